"""What the operating system says of this process's memory. It is told on Linux; elsewhere nothing is known.

The kernel keeps the most that was resident, and forgets it on demand. What was the most before it forgot is kept here,
so that the most of the whole process stays known.
"""

from __future__ import annotations

import ctypes
from mmap import PAGESIZE
from pathlib import Path
from threading import Event, Thread

from ort_accel.memory.malloc_settings import of_c_library

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PAGES = Path("/proc/self/statm")
_MACHINE = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_CONTAINER_LIMITS = [
    (_GROUPS / "memory.max", _GROUPS / "memory.current"),
    (_GROUPS / "memory/memory.limit_in_bytes", _GROUPS / "memory/memory.usage_in_bytes"),
]
"""Where version 2 and version 1 of control groups tell a container's limit and what it uses of it."""

_before_reset = [0]


def resident(key: str = "VmRSS") -> int | None:
    """Bytes of memory in use, or with `VmHWM` the most since the last reset. None where the system does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def resident_now() -> int:
    """Bytes of memory in use, told in a third of the time: for those who ask many times in a step. 0 where the system
    does not tell."""
    try:
        with _PAGES.open("rb", buffering=0) as file:
            return int(file.read().split()[1]) * PAGESIZE
    except OSError:
        return 0


def available() -> int | None:
    """Bytes that this process can still take: of the machine, and of its container. None where nothing is told."""
    try:
        lines = _MACHINE.read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    limits = [free, _left_in_container()]
    return min((limit for limit in limits if limit is not None), default=None)


def _left_in_container() -> int | None:
    for limit, used in _CONTAINER_LIMITS:
        try:
            return max(0, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # there is no such file, or no limit
            continue
    return None


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


class _Info(ctypes.Structure):
    """What glibc tells of its blocks, `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def in_use() -> int | None:
    """Bytes that were asked of the C library and not yet freed; None where it does not tell."""
    if (ask := of_c_library("mallinfo2")) is None:
        return None
    ask.restype = _Info
    info = ask()
    return int(info.uordblks + info.hblkhd)


class MostInUse:
    """Looks again and again, from a thread, at how much is in use."""

    EVERY = 0.001

    def __init__(self) -> None:
        self._most = in_use()
        self._ended = Event()
        self._thread = Thread(target=self._look, name="ort_accel memory", daemon=True)
        if self._most is not None:
            self._thread.start()

    def end(self) -> int | None:
        """Look no more. The most bytes until the first such call; None where nothing is told."""
        if self._most is not None:
            self._ended.set()
            self._thread.join()
        return self._most

    def _look(self) -> None:
        while not self._ended.wait(self.EVERY):
            self._most = max(self._most or 0, in_use() or 0)
