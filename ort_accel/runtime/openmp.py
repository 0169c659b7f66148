"""PyTorch's OpenMP threads, sent to sleep before ONNX Runtime works.

After a parallel loop OpenMP's threads stay awake for milliseconds, waiting for the next one. That is right between
PyTorch's own operators, and wrong where ONNX Runtime comes next: its threads then share the cores with threads that do
nothing. On two cores it made the first matrix product after each PyTorch segment twice as slow.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

SOFT = 1
"""`omp_pause_soft`: give the threads back, keep everything that was set."""

RUNTIMES = ("libgomp", "libiomp5", "libomp")


def rest_openmp() -> None:
    """Let the calling thread's OpenMP threads rest; where none are awake this takes well under a microsecond."""
    _rest()()


@cache
def _rest() -> Callable[[], object]:
    """The pause that OpenMP 5.0 defines, in each OpenMP library that this process has loaded from torch's folders."""
    pauses = [pause for pause in map(_pause, _loaded()) if pause is not None]
    return lambda: [pause(SOFT) for pause in pauses]


def _loaded() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/torch" in line}
    return sorted(path for path in paths if Path(path).name.startswith(RUNTIMES))


def _pause(path: str) -> Callable[[int], int] | None:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        pause = library.omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return pause
