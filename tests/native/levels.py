"""What tests of native kernels share: levels, sizes, and floats next to each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import level

if native_library() is None:
    pytest.skip("the native library was not built", allow_module_level=True)

LEVELS = range(level() + 1)
each_level = pytest.mark.parametrize("level", LEVELS)
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SIZES = (0, 1, 2, 7, 15, 16, 17, 31, 33, 100, 511, 512, 513, 1000, 40_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, torch.inf, -torch.inf, torch.nan)


def with_special_values(values: Tensor) -> Tensor:
    """Writes zeros, denormals, infinities and NaN at the end of a flat tensor, as far as it has room."""
    count = min(len(SPECIAL), len(values))
    values[len(values) - count :] = torch.tensor(SPECIAL[:count]).to(values.dtype)
    return values


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """True if two tensors have the same bits, except those of NaN."""
    assert found.dtype == expected.dtype
    whole = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[found.element_size()]
    different = found.view(whole) != expected.view(whole)
    return not (different & ~(found.isnan() & expected.isnan())).any()


def assert_as_exact(found: Tensor, eager: Tensor, exact: Tensor, scale: float = 0.0) -> None:
    """Asserts that a result errs at most four times as much as eager's, or as its type's rounding.

    Rounding is that of the largest exact number, or of `scale`, where numbers of that size are subtracted. NaN and
    infinities have to be where eager has them.
    """
    assert found.dtype == eager.dtype
    assert found.shape == eager.shape
    finite = eager.isfinite() & exact.isfinite()
    assert torch.equal(found.isnan(), eager.isnan())
    assert torch.equal(found[eager.isinf()], eager[eager.isinf()])
    if not finite.any():
        return
    exact = exact[finite].double()
    ours, theirs = ((one[finite].double() - exact).abs().max() for one in (found, eager))
    rounding = torch.finfo(found.dtype).eps * max(float(exact.abs().max()), scale)
    assert ours <= 4 * max(theirs, rounding), f"{ours} against eager's {theirs}, rounding {rounding}"


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Compares with a result of double precision, relative to its largest number or 1; NaN must agree, too."""
    assert found.shape == expected.shape
    expected = expected.double()
    finite = expected[expected.isfinite()]
    largest = max(finite.abs().max().item() if finite.numel() else 0.0, 1.0)
    epsilon = 4e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(
        found.double(), expected, rtol=factor * epsilon, atol=factor * epsilon * largest, equal_nan=True
    )
