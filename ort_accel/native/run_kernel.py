"""Calls a kernel of the native library alone, on tensors."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ort_accel.native.library import kernel, native_library

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers by which kernels know the types of elements."""

Argument = Tensor | int | float | None


def run_kernel(name: str, *arguments: Argument, level: int | None = None) -> None:
    """Runs a kernel: a tensor is passed as its address, None as null, an int in 64 bits, and a float as a double."""
    types = tuple(_type(argument) for argument in arguments)
    _function(name, types, level)(*(_passed(argument) for argument in arguments))


def level() -> int:
    """Returns the best instruction set of this processor: 0 baseline, 1 AVX2 with FMA, 2 AVX-512."""
    library = native_library()
    assert library is not None, "the native library was not built"
    return int(library.ort_accel_level())


@cache
def _function(name: str, types: tuple[type, ...], level: int | None) -> ctypes._FuncPointer:
    return kernel(name, *types, level=level)


def _type(argument: Argument) -> type:
    if isinstance(argument, float):
        return ctypes.c_double
    return ctypes.c_int64 if isinstance(argument, int) else ctypes.c_void_p


def _passed(argument: Argument) -> int | float | None:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument
