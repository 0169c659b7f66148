"""What the operating system says of this process's memory. It is told on Linux; elsewhere nothing is known.

The kernel keeps the most that was resident, and forgets it on demand. What was the most before it forgot is kept here,
so that the most of the whole process stays known.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

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
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
