"""Softmax with a scale and a mask errs no more than eager's, forward and backward."""

from __future__ import annotations

import pytest
import torch

from ort_accel.native.run_kernel import ELEMENTS, run_kernel
from tests.native.levels import DTYPES, LEVELS, assert_as_exact

aten = torch.ops.aten
SHAPES = [(0, 1, 2, 3), (1, 1, 1, 1), (1, 2, 3, 5), (2, 3, 4, 16), (2, 2, 5, 33), (1, 1, 3, 4001), (2, 4, 64, 128)]


def softmax(x, mask, scale, level):
    out = torch.empty_like(x)
    strides = (0, 0, 0) if mask is None else mask.expand(x.shape).stride()[:3]
    run_kernel("softmax", x, mask, *x.shape, *strides, scale, ELEMENTS[x.dtype], out, level=level)
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_softmax_and_its_gradient(shape, scale, dtype, level):
    torch.manual_seed(sum(shape))
    x, grad = (torch.randn(shape) * 4).to(dtype), torch.randn(shape).to(dtype)
    out = softmax(x, None, scale, level)
    exact = (x.double() * scale).softmax(-1)
    assert_as_exact(out, (x * scale).softmax(-1), exact)

    grad_x, rows = torch.empty_like(x), x[..., 0].numel()
    run_kernel("softmax_backward", grad, out, rows, shape[-1], scale, ELEMENTS[dtype], grad_x, level=level)
    theirs = aten._softmax_backward_data(grad, out, -1, dtype) * scale
    true = aten._softmax_backward_data(grad.double(), out.double(), -1, torch.float64) * scale
    assert_as_exact(grad_x, theirs, true, scale=scale)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "mask_shape", [(2, 3, 7, 19), (2, 1, 1, 19), (1, 3, 1, 19), (1, 1, 7, 19), (1, 1, 1, 19)], ids=str
)
def test_a_mask_is_added(mask_shape, dtype, level):
    x, mask = torch.randn(2, 3, 7, 19).to(dtype), torch.randn(mask_shape).to(dtype)
    mask[..., 3:9] = -torch.inf
    mask[..., 10] = torch.finfo(dtype).min
    exact = (x.double() * 0.3 + mask.double()).softmax(-1)
    assert_as_exact(softmax(x, mask, 0.3, level), (x * 0.3 + mask).softmax(-1), exact)


@pytest.mark.parametrize("level", LEVELS)
def test_masked_rows_infinities_and_nan_are_as_in_eager(level):
    x = torch.randn(1, 1, 5, 37)
    x[..., 0, :] = -torch.inf
    x[..., 1, 5], x[..., 2, 36], x[..., 3, 0] = torch.inf, torch.nan, -torch.inf
    assert_as_exact(softmax(x, None, 1.0, level), x.softmax(-1), x.double().softmax(-1))
