"""The memory of this process as the system and the C library report it. Only Linux reports it.

The kernel keeps the high-water mark of the resident set and can reset it. Earlier marks are kept here, so that the mark
of the whole process stays known.
"""

from __future__ import annotations

import ctypes
from mmap import PAGESIZE
from pathlib import Path
from threading import Event, Thread, current_thread

from ort_accel.memory.malloc_settings import libc_function

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CONTAINER_LIMITS = [
    (_CGROUP / "memory.max", _CGROUP / "memory.current"),
    (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
]
"""Files with the memory limit and the used memory of a container, for cgroup versions 2 and 1."""

_mark_before_reset = [0]


def resident(key: str = "VmRSS") -> int | None:
    """Returns the bytes of the resident set, or with `VmHWM` its high-water mark; None if the system has no answer."""
    return _status_bytes(_STATUS, key)


def _status_bytes(file: Path, key: str) -> int | None:
    """Returns the value of a key in a file of lines such as `VmRSS: 1024 kB`."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def resident_now() -> int:
    """Returns the bytes of the resident set, faster than `resident`; 0 if the system has no answer."""
    try:
        with _STATM.open("rb", buffering=0) as file:
            return int(file.read().split()[1]) * PAGESIZE
    except OSError:
        return 0


def available_bytes() -> int | None:
    """Returns the bytes that are left on the machine and in its container; None if the system has no answer."""
    if not _MEMINFO.exists():
        return None
    limits = (_status_bytes(_MEMINFO, "MemAvailable"), _left_in_container())
    return min((limit for limit in limits if limit is not None), default=None)


def _left_in_container() -> int | None:
    for limit, used in _CONTAINER_LIMITS:
        try:
            return max(0, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # the file is missing, or there is no limit
            continue
    return None


def reset_high_water_mark() -> bool:
    """Reset the high-water mark of the resident set; returns False if the system forbids it."""
    before = resident("VmHWM") or 0
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    _mark_before_reset[0] = max(_mark_before_reset[0], before)
    return True


def peak_before_reset() -> int:
    """Returns the highest high-water mark before the last reset; 0 without a reset."""
    return _mark_before_reset[0]


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def in_use() -> int | None:
    """Returns the bytes that are allocated from the C library; None if it has no answer."""
    mallinfo2 = libc_function("mallinfo2")
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _MallInfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


class AllocationSampler:
    """Samples the allocated bytes from a thread and keeps the highest."""

    INTERVAL_S = 0.001

    def __init__(self) -> None:
        self._most = in_use()
        self._ended = Event()
        self._thread = Thread(target=self._sample, name="ort_accel memory", daemon=True)
        if self._most is not None:
            try:
                self._thread.start()
            except RuntimeError:  # there is no memory for a thread
                self._most = None

    def end(self) -> int | None:
        """Stop at the first call, and return the highest bytes until then; None if there is no answer."""
        if self._most is not None:
            self._ended.set()
            if self._thread is not current_thread():  # garbage collection in the thread itself may end the sampler
                self._thread.join()
        return self._most

    def _sample(self) -> None:
        while not self._ended.wait(self.INTERVAL_S):
            self._most = max(self._most or 0, in_use() or 0)
