"""Pausing of PyTorch's OpenMP threads before ONNX Runtime runs.

OpenMP's threads spin for a while after a parallel loop, in case another loop follows. They are paused here, since they
would otherwise compete with ONNX Runtime's threads for the cores.

They are paused before a fork, too. A child process would otherwise wait forever for the threads of its parent, in its
first parallel loop or pause, since a fork copies OpenMP's record of them and not the threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

PAUSE_SOFT = 1
"""`omp_pause_soft`: release the threads and keep all settings."""

LIBRARIES = ("libgomp", "libiomp5", "libomp")


def pause_openmp() -> None:
    """Pause the OpenMP threads of the calling thread; cheap if none are awake."""
    for pause in _pause_functions():
        pause(PAUSE_SOFT)


@cache
def _pause_functions() -> list[Callable[[int], int]]:
    """Returns `omp_pause_resource_all` of each OpenMP library that this process has loaded from torch's folders."""
    return [pause for pause in map(_pause_function, _loaded_libraries()) if pause is not None]


def _loaded_libraries() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/torch" in line}
    return sorted(path for path in paths if Path(path).name.startswith(LIBRARIES))


def _pause_function(path: str) -> Callable[[int], int] | None:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        pause = library.omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return pause


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=pause_openmp)
