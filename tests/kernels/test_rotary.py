"""The operators of rotary embeddings compute, and lay out in memory, what eager's operators do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ort_accel.kernels import rotary as kernels
from ort_accel.kernels.rotary import own

X: dict[str, Callable[[], Tensor]] = {
    "positions before heads": lambda: torch.randn(2, 5, 3, 8).transpose(1, 2),
    "heads before positions": lambda: torch.randn(2, 3, 5, 8),
    "part of a wider row": lambda: torch.randn(2, 5, 3, 12).transpose(1, 2)[..., 2:10],
    "numbers apart": lambda: torch.randn(2, 3, 8, 5).transpose(2, 3),
    "repeated heads": lambda: torch.randn(2, 1, 5, 8).expand(-1, 3, -1, -1),
    "one row": lambda: torch.randn(1, 1, 1, 8),
    "no row": lambda: torch.randn(0, 3, 5, 8),
    "packed rows": lambda: torch.randn(5, 3, 8),
    "a vector": lambda: torch.randn(8),
    "five dimensions": lambda: torch.randn(2, 2, 3, 5, 8),
    "doubles": lambda: torch.randn(2, 3, 5, 8, dtype=torch.double),
}


def tables_for(x: Tensor) -> list[Tensor]:
    shape = [5, 1, 8] if x.ndim == 3 else [1, 5, 8][: x.ndim] if x.ndim > 1 else [8]
    if x.ndim > 1 and x.shape[-2] == 1:
        shape[-2] = 1
    if x.ndim == 4:  # with gaps
        return [torch.randn(*shape[:-1], 16, dtype=x.dtype)[..., 4:12] for _ in range(2)]
    return [torch.randn(shape, dtype=x.dtype) for _ in range(2)]


def eager(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cosines + torch.cat((-high, low), -1) * sines


@pytest.fixture(params=[True, False], ids=["native", "PyTorch's operators"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(kernels, "native_library", lambda: None)
    elif kernels.native_library() is None:
        pytest.skip("the native library was not built")
    return bool(request.param)


@pytest.mark.parametrize("name", X)
def test_results_and_gradients_are_eagers(name: str, library: bool) -> None:
    torch.manual_seed(0)
    x = X[name]()
    tables, grad = tables_for(x), torch.randn(x.shape, dtype=x.dtype)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    found, expected = own.rotary(ours, *tables), eager(theirs, *tables)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for one, result in ((ours, found), (theirs, expected)):
        result.backward(grad)
        assert one.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


@pytest.mark.parametrize("name", X)
def test_fake_results_have_the_layout_of_true_ones(name: str, library: bool) -> None:
    x = X[name]()
    tables = tables_for(x)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(one) for one in (x, *tables)]
    for operator in (own.rotary, own.rotary_backward):
        assert operator(*fakes).stride() == operator(x, *tables).stride()


def test_the_gradient_has_a_gradient() -> None:
    x = torch.randn(2, 3, dtype=torch.double).repeat(1, 2).requires_grad_()
    tables = [torch.randn(2, 6, dtype=torch.double) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda x: own.rotary(x, *tables), x)
    assert torch.autograd.gradgradcheck(lambda x: own.rotary(x, *tables), x)
