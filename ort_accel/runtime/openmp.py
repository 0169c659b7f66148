"""Makes PyTorch's OpenMP threads leave the cores to ONNX Runtime's sessions, and rests them before a fork.

OpenMP's threads spin for milliseconds after a parallel loop, in case another loop follows. They are paused before a
session runs, since they would otherwise compete with ONNX Runtime's threads for the cores.

Where other processes take the cores, too, spinning is worse: it uses up the time that the system gives to this process.
libgomp spins for about a microsecond while it has more threads than there are cores. So one more of them exists during
a session, if the calling thread had to wait for a core during the last one. Steps of eager mode find the threads
spinning as ever.

Threads are paused before a fork, too. A child process would otherwise wait forever for the threads of its parent, in
its first parallel loop or pause, since a fork copies OpenMP's record of them and not the threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue

PAUSE_SOFT = 1
"""`omp_pause_soft`: release the threads and keep all settings."""

LIBRARIES = ("libgomp", "libiomp5", "libomp")

CROWDED_SHARE = 0.1
"""The share of a session's time for which its thread may wait for a core, before threads stop to spin."""

LINGER_S = 0.01
"""The additional thread stays as long after a session, in case another one follows."""

SCHEDULER_STATISTICS = Path("/proc/thread-self/schedstat")
"""Nanoseconds for which a thread has run, for which it has waited for a core, and its turns."""


def pause_openmp() -> None:
    """Pause the OpenMP threads of the calling thread; cheap if none are awake."""
    for library in _libraries():
        library.omp_pause_resource_all(PAUSE_SOFT)


class SharedCores:
    """The way in which OpenMP's threads leave the cores to sessions."""

    def __init__(self) -> None:
        self.is_crowded = False
        """True if the last session had to wait for cores."""

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A context in which a session runs."""
        changes = _changes_of_additional_thread() if self.is_crowded else None
        if changes is None:
            pause_openmp()
        else:
            changes.put(1)
        begin, waited_ns = time.perf_counter_ns(), _waited_ns()
        try:
            yield
        finally:
            if changes is not None:
                changes.put(-1)
            self.is_crowded = _waited_ns() - waited_ns > CROWDED_SHARE * (time.perf_counter_ns() - begin)


def _waited_ns() -> int:
    """Returns for how long this thread has waited for a core; 0 where the system does not tell."""
    try:
        return int(SCHEDULER_STATISTICS.read_bytes().split()[1])
    except (OSError, IndexError):
        return 0


@cache
def _changes_of_additional_thread() -> SimpleQueue[int] | None:
    """Returns the queue that counts running sessions; None without libgomp."""
    starts = [library.GOMP_parallel for library in _libraries() if hasattr(library, "GOMP_parallel")]
    if not starts:
        return None
    changes: SimpleQueue[int] = SimpleQueue()
    threading.Thread(target=_keep_additional_thread, args=(starts[0], changes), name="ort_accel", daemon=True).start()
    return changes


def _keep_additional_thread(start: Callable[..., object], changes: SimpleQueue[int]) -> None:
    """Have an OpenMP thread of this thread's own while sessions run."""
    do_nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    running, exists = 0, False
    while True:
        try:
            running += changes.get(timeout=LINGER_S if exists and not running else None)
        except Empty:
            pause_openmp()
            exists = False
            continue
        if running and not exists:
            start(do_nothing, None, 2, 0)
            exists = True


@cache
def _libraries() -> list[ctypes.CDLL]:
    """Returns each OpenMP library that this process has loaded from torch's folders."""
    found = [library for library in map(_opened, _loaded_paths()) if library is not None]
    return [library for library in found if hasattr(library, "omp_pause_resource_all")]


def _loaded_paths() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/torch" in line}
    return sorted(path for path in paths if Path(path).name.startswith(LIBRARIES))


def _opened(path: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=pause_openmp, after_in_child=_changes_of_additional_thread.cache_clear)
