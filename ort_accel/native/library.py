"""Finds the native library and loads it, and says why it is missing."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

LIBRARY_FILE = Path(__file__).with_name("libort_accel.so")


@cache
def native_library() -> ctypes.CDLL | None:
    """Returns the native library; None where it was not built."""
    try:
        library = ctypes.CDLL(str(LIBRARY_FILE))
    except OSError:
        return None
    library.ort_accel_kernel.restype = ctypes.c_void_p
    library.ort_accel_kernel.argtypes = (ctypes.c_char_p, ctypes.c_int)
    return library


def kernel(name: str, *argument_types: object, level: int | None = None) -> ctypes._FuncPointer:
    """Returns a kernel as a function, in its variant for an instruction set; by default for this processor's best."""
    library = native_library()
    assert library is not None, "the native library was not built"
    address = library.ort_accel_kernel(name.encode(), library.ort_accel_level() if level is None else level)
    assert address, f"the native library has no kernel {name}"
    return ctypes.CFUNCTYPE(None, *argument_types)(address)
