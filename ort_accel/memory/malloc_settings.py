"""What the C library does with memory that was freed. glibc can be told, for the whole process; others cannot."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from typing import Any

JOINING = "glibc.malloc.tcache_count=0"
"""The tunable that has glibc join freed blocks with what lies around them. It reads it when a process starts."""

_JOINS_SINCE = (2, 39)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The numbers of these parameters for glibc's `mallopt`."""
_LARGEST_IN_HEAP, _NEVER = 32 << 20, -1
"""The largest value of the second that glibc allows, and for the first that nothing is given back by itself."""
_THRESHOLDS = ("trim_threshold", "mmap_threshold", "top_pad")
"""What somebody may have told glibc: as `MALLOC_TOP_PAD_` in the environment, or as `glibc.malloc.top_pad` among its
tunables."""


def return_free_memory() -> None:
    """Let the C library give back what it keeps of freed memory, where it can."""
    if (trim := of_c_library("malloc_trim")) is not None:
        trim(0)


@cache
def joins_freed_blocks() -> bool:
    """Whether a freed block is joined with what was cut off from it when it was taken.

    PyTorch takes memory at multiples of 64 bytes. What glibc cuts off from a larger block for that went, before 2.39,
    to the thread's cache of small blocks. Once freed, the block is then a little too small for the next one of its
    size, and in the long run the gaps take as much as what is in use.
    """
    return JOINING in _tunables().split(":") or _glibc() >= _JOINS_SINCE


def leaves_gaps() -> bool:
    """Whether it is a glibc that leaves gaps between freed blocks, and was not told to join them."""
    return bool(_glibc()) and not joins_freed_blocks()


def keep_freed_blocks() -> bool:
    """Let the C library keep what a step frees for the next one; whether it will.

    By itself glibc gives the end of its memory back whenever more than twice the largest block is free there. A step
    then takes it anew, page by page: 15,000 pages in each step of a masked language model took 100 ms of 740 on two
    virtual cores. It is left as it is where somebody has told it what to do.
    """
    tunables = _tunables()
    told = any(f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}" in tunables for name in _THRESHOLDS)
    return not told and _set_thresholds(_LARGEST_IN_HEAP, _NEVER)


@cache
def of_c_library(name: str) -> Any:
    """A function that only some C libraries have; None where this one has not."""
    with suppress(OSError, AttributeError, TypeError):  # Windows cannot look at what is loaded already
        return getattr(ctypes.CDLL(None), name)
    return None


def _set_thresholds(mmap: int, trim: int) -> bool:
    tell = of_c_library("mallopt")
    return tell is not None and bool(tell(_MMAP_THRESHOLD, mmap)) and bool(tell(_TRIM_THRESHOLD, trim))


def _tunables() -> str:
    return os.environ.get("GLIBC_TUNABLES", "")


def _glibc() -> tuple[int, ...]:
    """The version of glibc; nothing where there is another library."""
    with suppress(AttributeError, ValueError, OSError):  # Windows has no such question, macOS and musl no such answer
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return tuple(map(int, version.split("."))) if name == "glibc" else ()
    return ()
