"""Whole graphs in one session, whose operators are calls of PyTorch's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import ort_accel
from ort_accel.native.library import native_library
from ort_accel.partition.assign import Assignment, Refusal
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.segments import Runner
from tests.executor.one_session import Compiled

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


IDS = torch.tensor([[0, 2, 1], [3, 3, 0]])

CASES: dict[str, tuple[Callable[..., Any], Sequence[Tensor]]] = {
    "product": (torch.mm, (normal(5, 7), normal(7, 3))),
    "product with a bias": (torch.addmm, (normal(3), normal(5, 7), normal(7, 3))),
    "product with numbers": (lambda *x: torch.addmm(*x, beta=0.5, alpha=2), (normal(3), normal(5, 7), normal(7, 3))),
    "batched": (torch.bmm, (normal(4, 5, 7), normal(4, 7, 3))),
    "linear of a transposed weight": (lambda x, w: x @ w.t(), (normal(5, 7), normal(3, 7))),
    "norm, three results": (lambda x, w: torch.native_layer_norm(x, [8], w, None, 1e-5), (normal(3, 8), normal(8))),
    "text": (lambda x: functional.gelu(x, approximate="tanh"), (normal(4, 4),)),
    "number of any type": (lambda x, y: torch.add(x, y, alpha=3), (normal(4, 4), normal(4))),
    "number in place of a tensor": (lambda x: (x * 0.5 > 0.1).to(x.dtype), (normal(4, 4),)),
    "list of sizes": (lambda x: x.sum([0, 2], keepdim=True), (normal(3, 4, 5),)),
    "list of tensors": (lambda x, y: torch.cat([x, y, x], 1), (normal(2, 3), normal(2, 4))),
    "list of optional tensors": (lambda x, i: x[:, i], (normal(4, 5), torch.tensor([3, 0, 3]))),
    "type": (lambda x: x.to(torch.float64).softmax(-1), (normal(3, 5),)),
    "embedding": (lambda w, i: functional.embedding(i, w, padding_idx=0), (normal(4, 6), IDS)),
    "slices and permuted views": (
        lambda x: (x[:, 1:4].transpose(1, 2) * 2, x.permute(2, 0, 1).exp()),
        (normal(3, 5, 7),),
    ),
    "a view that needs a copy": (lambda x: torch.exp(x.t().reshape(-1)), (normal(3, 5),)),
    "parts of a view": (lambda x: torch.add(*x.split(3, -1)), (normal(4, 6),)),
    "positions in memory": (lambda x: x.exp().as_strided((3, 4), (1, 3), 2), (normal(4, 6),)),
    "positions in permuted memory": (lambda x: x.t().exp().as_strided((4, 6), (6, 1)), (normal(4, 6),)),
    "positions in memory of an input with gaps": (
        lambda x: x.exp().as_strided((3, 2), (4, 1), 1).exp(),
        (normal(6, 8)[::2, 1:5],),
    ),
    "average of all": (lambda x: functional.adaptive_avg_pool1d(x, 1).flatten(1).exp(), (normal(2, 3, 5),)),
    "an input with gaps": (lambda x: x.exp(), (normal(6, 8)[::2, 1:5],)),
    "an expanded input": (lambda x: x.exp(), (normal(1, 4).expand(3, 4),)),
    "without elements": (lambda x: x.exp().sum(0), (normal(0, 4),)),
    "a number": (lambda x: x.exp(), (normal(),)),
    "loss that resizes": (lambda x, y: functional.huber_loss(x, y), (normal(3, 4), normal(3, 4))),
    "convolution": (lambda x, w: functional.conv2d(x, w, padding=1), (normal(2, 3, 8, 8), normal(4, 3, 3, 3))),
    "flash attention": (functional.scaled_dot_product_attention, (normal(2, 3, 5, 8),) * 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_calls_return_what_eager_returns(name: str, dtype: torch.dtype) -> None:
    function, args = CASES[name]
    given = [arg.to(dtype) if arg.is_floating_point() else arg for arg in args]
    if "gaps" in name or "expanded" in name:
        given = [args[0].to(dtype).expand(3, 4) if "expanded" in name else normal(6, 8, dtype=dtype)[::2, 1:5]]
    expected = function(*given)
    compiled = Compiled(function, given)
    for _ in range(2):  # the second run gives its inputs back early
        found = compiled(*given)
        for ours, eager in zip(found, expected if isinstance(expected, tuple) else [expected], strict=True):
            assert torch.equal(ours, eager)
            assert ours.stride() == eager.stride()
    assert set(compiled.operators) == {"AtenCall"}


def test_a_view_that_onnx_runtime_cannot_take_is_copied() -> None:
    """It has no kernel that expands bfloat16."""

    def refused(given: Assignment) -> dict[fx.Node, Refusal]:
        views = [node for node in given.runner if node.target is torch.ops.aten.expand.default]
        return dict.fromkeys(views, Refusal(Reason.UNSUPPORTED_DTYPE))

    x = normal(3, 1, 4, dtype=torch.bfloat16)
    compiled = Compiled(lambda x: x.expand(3, 2, 4).clone(memory_format=torch.contiguous_format), (x,), refused=refused)
    (found,) = compiled(x)
    assert torch.equal(found, x.expand(3, 2, 4))
    assert "Expand" not in compiled.operators


def test_sizes_may_change() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.view(-1, 4), y[1:]], 0).t() * x.shape[0]

    compiled = Compiled(function, (normal(6, 2, 4), normal(5, 4)), "symbolic")
    for rows in (6, 3, 9, 6):
        args = normal(rows, 2, 4), normal(rows - 1, 4)
        torch.testing.assert_close(compiled(*args)[0], function(*args))


def test_random_operators_draw_in_the_order_of_the_graph() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.rand_like(x), torch.bernoulli(x.sigmoid())
        return torch.randn_like(x), second * 2, first + 1

    compiled = Compiled(function, (normal(50, 3),))
    torch.manual_seed(3)
    expected = function(normal(50, 3))
    torch.manual_seed(3)
    for ours, eager in zip(compiled(normal(50, 3)), expected, strict=True):
        assert torch.equal(ours, eager)


def test_a_tensor_is_free_after_its_last_call() -> None:
    """The last operator of the session sees that the input of the first one is gone, from the second run on."""
    held: list[weakref.ref[np.ndarray]] = []
    alive: list[bool] = []
    library = torch.library.Library("ort_accel_test", "DEF")
    library.define("look(Tensor x) -> Tensor")

    def look(x: Tensor) -> Tensor:
        alive.append(held[-1]() is not None)
        return x.clone()

    library.impl("look", look, "CompositeExplicitAutograd")
    torch.library.register_fake("ort_accel_test::look", torch.empty_like, lib=library)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.ort_accel_test.look(torch.mm(x, w).sum(0))

    compiled = Compiled(function, (normal(64, 8), normal(8, 8)))
    for _ in range(2):
        memory = np.ones((64, 8), np.float32)
        held.append(weakref.ref(memory))
        tensors = [torch.from_numpy(memory), normal(8, 8)]
        del memory
        compiled.segment(tensors, {})
        tensors.clear()
    assert alive == [True, False]


def test_an_error_is_that_of_eager_mode() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 2))
    config = {"compute": {"native": True}, "engine": {"run_in_pytorch": ["aten.embedding"]}}
    ort_accel.accelerate(model, config)
    for _ in range(2):
        model(IDS).sum().backward()
        with pytest.raises(IndexError, match="index out of range in self"):
            model(IDS + 3)
    assert {segment.runner for segment in ort_accel.report(model).segments} == {Runner.ORT}
    assert ort_accel.report(model).coverage["forward"]["nodes_by_pytorch_in_onnxruntime"] >= 1


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_model_trains_in_one_session_a_direction(dropout: float) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
    eager = nn.Sequential(layer, nn.Linear(32, 5))
    ours = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True), nn.Linear(32, 5))
    ours.load_state_dict(eager.state_dict())
    config = {"compute": {"native": True}, "memory": {"early_gradient_release": False}, "engine": {"fallback": "error"}}
    ort_accel.accelerate(ours, config)
    for seed in range(3):
        losses = []
        for model in (eager, ours):
            torch.manual_seed(seed)
            model.zero_grad()
            losses.append(functional.cross_entropy(model(normal(4, 6, 32)).flatten(0, 1), torch.arange(24) % 5))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0])
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    segments = ort_accel.report(ours).segments
    assert [segment.runner for segment in segments] == [Runner.ORT] * 2
