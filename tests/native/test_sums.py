"""Sums by the native kernel have the bits of eager's where a product is not rounded in between."""

from __future__ import annotations

import pytest
import torch

from ort_accel.native.run_kernel import ELEMENTS, run_kernel
from tests.native.levels import DTYPES, LEVELS, SIZES, same_bits, with_special_values


def add(x, y, alpha, level):
    out = torch.empty_like(x)
    run_kernel("add", x, y, alpha, x.numel(), ELEMENTS[x.dtype], out, level=level)
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_sum(size, dtype, level):
    torch.manual_seed(size)
    x, y = (with_special_values(torch.randn(size).to(dtype)) for _ in range(2))
    y = y.flip(0).contiguous()
    assert same_bits(add(x, y, 1.0, level), x + y)
    assert same_bits(add(x, y, -1.0, level), x - y)
    assert same_bits(add(x, y, 2.0, level), torch.add(x, y, alpha=2))
    assert same_bits(add(x, None, 0.5, level), x + 0.5)
