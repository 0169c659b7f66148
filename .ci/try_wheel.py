"""Tries an installed wheel where there are neither compilers nor torch: the native library loads, and a kernel runs."""

import ctypes
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from ort_accel.native.library import INSTRUCTION_SETS, LIBRARY_FILE, kernel, native_library, native_status


def main() -> None:
    """Run a kernel in each variant that this processor has."""
    assert Path(sys.prefix) in LIBRARY_FILE.parents, f"{LIBRARY_FILE} is not the installed wheel's"
    assert find_spec("torch") is None
    assert not any(map(shutil.which, ("c++", "g++", "gcc", "clang++", "cmake")))
    library = native_library()
    assert library is not None, native_status().missing
    truth = [index % 3 == 0 for index in range(21)]
    expected = [sum(truth[at + bit] << bit for bit in range(8) if at + bit < len(truth)) for at in range(0, 21, 8)]
    for level in range(library.ort_accel_level() + 1):
        pack_bits = kernel("pack_bits", ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, level=level)
        bits = (ctypes.c_uint8 * 3)()
        pack_bits((ctypes.c_uint8 * 21)(*truth), 21, bits)
        assert list(bits) == expected, f"{INSTRUCTION_SETS[level]}: {list(bits)} instead of {expected}"
    print(f"{LIBRARY_FILE.name}, {LIBRARY_FILE.stat().st_size / 1024:.0f} KiB: {native_status()}")


if __name__ == "__main__":
    main()
