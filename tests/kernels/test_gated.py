"""The operators of activated gates compute what eager's operators do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ort_accel.kernels import gated as kernels
from ort_accel.kernels.gated import FUNCTIONS, own

EAGER = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
SHAPES = [(), (1,), (0, 5), (3, 7, 41), (2, 513)]


@pytest.fixture(params=[True, False], ids=["native", "PyTorch's operators"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(kernels, "native_library", lambda: None)
    elif kernels.native_library() is None:
        pytest.skip("the native library was not built")
    return bool(request.param)


def with_gradients(function, gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [one.detach().requires_grad_() for one in (gate, up)]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("halves", [True, False])
def test_results_and_gradients_are_eagers(halves: bool, shape: tuple[int, ...], activation: str, library: bool) -> None:
    torch.manual_seed(0)
    gate, up, grad = (torch.randn(shape) for _ in range(3))
    if halves and shape:
        gate, up = torch.cat([gate, up], -1).chunk(2, -1)
    ours = with_gradients(lambda gate, up: own.gated(gate, up, activation), gate, up, grad)
    theirs = with_gradients(lambda gate, up: EAGER[activation](gate) * up, gate, up, grad)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        assert one.is_contiguous()


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_the_gradients_have_gradients(activation: str) -> None:
    operands = [torch.randn(3, 2, dtype=torch.double, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda *given: own.gated(*given, activation), operands)
    assert torch.autograd.gradgradcheck(lambda *given: own.gated(*given, activation), operands)


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_operand_may_need_no_gradient(frozen: int) -> None:
    operands = [torch.randn(3, 2, requires_grad=at != frozen) for at in range(2)]
    own.gated(*operands, "silu").sum().backward()
    assert operands[frozen].grad is None
    assert operands[1 - frozen].grad is not None
