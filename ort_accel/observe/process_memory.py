"""What the operating system says of this process's memory. It is told on Linux; elsewhere nothing is known.

The kernel keeps the most that was resident, and forgets it on demand. What was the most before it forgot is kept here,
so that the most of the whole process stays known.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

_before_reset = [0]


def resident(key: str = "VmRSS") -> int | None:
    """Bytes of memory in use, or with `VmHWM` the most since the last reset. None where the system does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def reset_peak() -> bool:
    """Forget the most memory that was in use; whether the system allows that."""
    before = resident("VmHWM") or 0
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    _before_reset[0] = max(_before_reset[0], before)
    return True


def most_before_reset() -> int:
    """The most bytes that were resident before the peak was last reset; 0 if it never was."""
    return _before_reset[0]


def return_free_memory() -> None:
    """Let the C library give back what it keeps of freed memory, where it can."""
    if (trim := _of_c_library("malloc_trim")) is not None:
        trim(0)


@cache
def _of_c_library(name: str) -> Any:
    """A function that only some C libraries have; None where this one has not."""
    with suppress(OSError, AttributeError, TypeError):  # Windows cannot look at what is loaded already
        return getattr(ctypes.CDLL(None), name)
    return None


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The numbers of these parameters for glibc's `mallopt`."""
_LARGEST_IN_HEAP, _NEVER = 32 << 20, -1
"""The largest value of the second that glibc allows, and for the first that nothing is given back."""
_TOLD_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Variables of the environment that tell glibc."""
LARGE = 2**20
"""Bytes."""

_promised = [False]
"""Whether large blocks are to go back at once, for the whole process."""


def return_large_blocks() -> bool:
    """Let the C library give each large block back as soon as it is freed; whether it will.

    By itself glibc raises the size from which on it does that up to 32 MiB, and keeps smaller ones for later. It takes
    time to get memory anew, so this is for those who have promised to hold little.
    """
    _promised[0] = True
    return _set_thresholds(LARGE, 2 * LARGE)  # twice as much, as glibc keeps it by itself


def keep_freed_blocks() -> bool:
    """Let the C library keep what a step frees for the next one; whether it will.

    By itself glibc gives the end of its memory back whenever more than twice the largest block is free there. A step
    then takes it anew, page by page: 15,000 pages in each step of a masked language model took 100 ms of 740 on two
    virtual cores. It is left as it is where somebody has told it what to do, and where little is to be held.
    """
    told = any(name in os.environ for name in _TOLD_BY) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return not told and not _promised[0] and _set_thresholds(_LARGEST_IN_HEAP, _NEVER)


def _set_thresholds(mmap: int, trim: int) -> bool:
    tell = _of_c_library("mallopt")
    return tell is not None and bool(tell(_MMAP_THRESHOLD, mmap)) and bool(tell(_TRIM_THRESHOLD, trim))


class _Info(ctypes.Structure):
    """What glibc tells of its blocks, `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def in_use() -> int | None:
    """Bytes that were asked of the C library and not yet freed; None where it does not tell."""
    if (ask := _of_c_library("mallinfo2")) is None:
        return None
    ask.restype = _Info
    info = ask()
    return int(info.uordblks + info.hblkhd)


class MostInUse:
    """Looks again and again, from a thread, at how much is in use."""

    EVERY = 0.001

    def __init__(self) -> None:
        self._before = in_use()
        self._most = self._before or 0
        self._ended = Event()
        self._thread = Thread(target=self._look, name="ort_accel memory", daemon=True)
        if self._before is not None:
            self._thread.start()

    def end(self) -> int | None:
        """Look no more. By how many bytes it grew at most until the first such call; None where nothing is told."""
        if self._before is None:
            return None
        self._ended.set()
        self._thread.join()
        return self._most - self._before

    def _look(self) -> None:
        while not self._ended.wait(self.EVERY):
            self._most = max(self._most, in_use() or 0)
