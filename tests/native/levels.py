"""The instruction sets that this processor can run the native kernels with."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ort_accel.native.library import native_library

library = native_library()
if library is not None and hasattr(library, "ort_accel_attach"):
    library.ort_accel_attach.restype = ctypes.c_char_p
    library.ort_accel_attach()

LEVELS = list(range(library.ort_accel_level() + 1)) if library is not None else []
TYPES = [torch.float32, torch.bfloat16]

needs_library = pytest.mark.skipif(library is None, reason="the native library was not built")
each_level = pytest.mark.parametrize("level", LEVELS)
each_type = pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16"])


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Compares with a result of double precision, relative to its largest number or 1; NaN must agree, too."""
    assert found.shape == expected.shape
    expected = expected.double()
    finite = expected[expected.isfinite()]
    largest = max(finite.abs().max().item() if finite.numel() else 0.0, 1.0)
    epsilon = 4e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(
        found.double(), expected, rtol=factor * epsilon, atol=factor * epsilon * largest, equal_nan=True
    )
