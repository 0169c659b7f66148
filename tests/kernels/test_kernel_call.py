"""The native library's kernels within a session compute what eager's operators do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ort_accel
from ort_accel.kernels.bit_mask import own
from ort_accel.kernels.gated import FUNCTIONS
from ort_accel.kernels.kernel_call import kernel_for
from ort_accel.native.library import native_library
from ort_accel.passes.fuse_tied_embedding import EMBEDDING_BACKWARD_ONTO
from tests.executor.one_session import Compiled

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")

aten = torch.ops.aten
IDS = torch.tensor([[0, 2, 1], [3, 3, 0]])
MASK = torch.arange(12) % 3 > 0


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def heads() -> Tensor:
    """Returns heads before positions, as a view of positions before heads."""
    return normal(2, 5, 3, 8).transpose(1, 2)


TABLES = normal(1, 1, 5, 8), normal(1, 1, 5, 8) + 1


def norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Sequence[Tensor]:
    _, mean, rstd = aten.native_layer_norm(x, [8], weight, bias, 1e-5)
    return aten.native_layer_norm_backward(grad, x, [8], mean, rstd, weight, bias, [True, True, True])


IN_SINGLE = ("norm", "rotary", "gated", "add_embedding")
"""Parts of the names of kernels that run in single precision alone: eager rounds within, or has other statistics."""

CASES: dict[str, tuple[str, Callable[..., Any], Sequence[Tensor]]] = {
    "norm": (
        "layer_norm",
        lambda x, w, b: aten.native_layer_norm(x, [8], w, b, 1e-5)[0],
        (normal(3, 2, 8), normal(8), normal(8)),
    ),
    "norm's gradient": ("layer_norm_backward", norm_gradient, (normal(5, 8), normal(5, 8), normal(8), normal(8))),
    "RMS norm": ("rms_norm", lambda x, w: own.rms_norm(x, w, 1e-5)[0], (normal(3, 2, 8), normal(8))),
    "RMS norm's gradient": (
        "rms_norm_backward",
        lambda grad, x, w: own.rms_norm_backward(grad, x, w, own.rms_norm(x, w, 1e-5)[1], True),
        (normal(5, 8), normal(5, 8), normal(8)),
    ),
    "RMS norm's gradient without a weight": (
        "rms_norm_backward",
        lambda grad, x: own.rms_norm_backward(grad, x, None, own.rms_norm(x, None, 1e-5)[1], False)[0],
        (normal(5, 8), normal(5, 8)),
    ),
    "rotary embedding": ("rotary", own.rotary, (heads(), *TABLES)),
    "rotary embedding's gradient": ("rotary", own.rotary_backward, (heads(), *TABLES)),
    "rotary embedding of packed rows": ("rotary", own.rotary, (normal(5, 3, 8), normal(5, 1, 8), normal(5, 1, 8))),
    "rotary embedding of a part": (
        "rotary",
        lambda x, c, s: torch.cat([own.rotary(x[..., :4], c[..., :4], s[..., 4:]), x[..., 4:]], -1),
        (heads(), *TABLES),
    ),
    **{
        f"{activation} as a gate": (
            "gated_activation",
            partial(own.gated, activation=activation),
            (normal(3, 7), normal(7, 3).t()),
        )
        for activation in FUNCTIONS
    },
    **{
        f"{activation} as a gate, gradients": (
            "gated_activation_backward",
            partial(own.gated_backward, activation=activation),
            (normal(3, 7), normal(3, 7), normal(3, 14)[:, 7:]),
        )
        for activation in FUNCTIONS
    },
    "sum": ("add", torch.add, (normal(7, 9), normal(7, 9))),
    "sum of a product": ("add", lambda x, y: torch.add(x, y, alpha=3), (normal(7, 9), normal(7, 9))),
    "sum with a number": ("add", lambda x: x + 2, (normal(700, 9),)),
    "difference": ("add", lambda x, y: torch.sub(x, y, alpha=0.5), (normal(7, 9), normal(7, 9))),
    "embedding": ("gather_rows", aten.embedding, (normal(4, 6), IDS)),
    "selected rows": ("gather_rows", lambda x, i: x.index_select(0, i), (normal(4, 3, 2), IDS[1])),
    "embedding's gradient": (
        "embedding_gradient",
        lambda grad, i: aten.embedding_dense_backward(grad, i, 5, 0, False),
        (normal(2, 3, 6), IDS),
    ),
    "sum with an embedding's gradient": (
        "add_embedding_gradient",
        lambda base, grad, i: EMBEDDING_BACKWARD_ONTO(base, grad, i, 5, 0, False, base.sum()),
        (normal(5, 6), normal(2, 3, 6), IDS),
    ),
    "rows added to zeros": (
        "embedding_gradient",
        lambda x, i: x.new_zeros(5, 6).index_add(0, i, x),
        (normal(3, 6), IDS[1]),
    ),
    "dropout": ("apply_dropout", lambda x, bits: own.apply_bits(x, bits, 1.25), (normal(3, 4), own.to_bits(MASK))),
}


def kernels_of(compiled: Compiled) -> list[str]:
    return [call.name for call in compiled.assignment.called.values() if call is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_eager_does(name, dtype):
    kernel, function, args = CASES[name]
    args = [arg.to(dtype) if arg.is_floating_point() else arg for arg in args]
    if dtype == torch.bfloat16 and any(part in kernel for part in IN_SINGLE):
        graph = make_fx(function, tracing_mode="fake")(*args).graph
        assert kernel not in {call.name for call in map(kernel_for, graph.nodes) if call is not None}
        return
    compiled = Compiled(function, args, refused=lambda _: {})
    assert kernel in kernels_of(compiled)
    found, expected = compiled(*args), function(*args)
    expected = [expected] if isinstance(expected, Tensor) else expected
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["sum", "norm", "embedding", "silu as a gate"])
def test_sizes_may_change(name):
    _, function, args = CASES[name]
    compiled = Compiled(function, args, mode="symbolic", refused=lambda _: {})
    larger = [torch.cat([arg, arg]) if arg.ndim > 1 else arg for arg in args]
    for given in (args, larger, args):
        torch.testing.assert_close(compiled(*given)[0], function(*given))


def test_positions_of_a_rotary_embedding_may_change():
    def function(x, cosines, sines):
        return own.rotary(x.transpose(1, 2), cosines.unsqueeze(1), sines.unsqueeze(1))

    made = [(normal(2, n, 3, 8), normal(1, n, 8), normal(1, n, 8) + 1) for n in (5, 9, 2)]
    compiled = Compiled(function, made[0], mode="symbolic", refused=lambda _: {})
    assert compiled.operators == ["KernelCall"], "views are read where they lie"
    for given in made:
        found, expected = compiled(*given)[0], function(*given)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_zeros_that_a_kernel_adds_to_are_not_made():
    args = normal(3, 6), IDS[1]
    compiled = Compiled(lambda x, i: x.new_zeros(5, 6).index_add(0, i, x), args, refused=lambda _: {})
    assert compiled.operators == ["KernelCall"]


def test_views_are_read_in_their_order():
    def function(x, y):
        return x.t().exp() + y, x[1:] + y[:, :3].t()[:2]

    args = normal(3, 4), normal(4, 3)
    for ours, theirs in zip(Compiled(function, args, refused=lambda _: {})(*args), function(*args), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rows_that_do_not_exist_raise_eagers_error():
    model = ort_accel.accelerate(nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 2)))
    for _ in range(2):
        model(IDS).sum().backward()
        with pytest.raises(IndexError, match="index out of range in self"):
            model(IDS + 3)
    assert ort_accel.report(model).coverage["forward"]["nodes_by_ort_accel_in_onnxruntime"] == 1


@pytest.mark.parametrize("other", [torch.ones(6), torch.ones(4, 6, dtype=torch.long)], ids=["broadcast", "types"])
def test_a_sum_that_no_kernel_takes(other):
    args = normal(4, 6), other
    compiled = Compiled(torch.add, args, refused=lambda _: {})
    assert not compiled.assignment.called
    torch.testing.assert_close(compiled(*args)[0], torch.add(*args))


def test_an_empty_tensor_is_not_given_to_onnx_runtime():
    """Some of its kernels give no result then, so that PyTorch's operator is called."""
    model = ort_accel.accelerate(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    for rows in (3, 0, 5):
        x = torch.randn(rows, 4)
        model.zero_grad()
        model(x).sum().backward()
        assert model[0].weight.grad is not None
        assert bool((model[0].weight.grad == 0).all()) is (rows == 0)
