"""Settings of the C library's malloc: trimming, the mmap threshold and heap fragmentation. Only glibc has them."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache

COALESCING_TUNABLE = "glibc.malloc.tcache_count=0"
"""The tunable with which glibc coalesces freed blocks. glibc reads tunables when a process starts."""

_COALESCES_SINCE = (2, 39)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
_MAX_MMAP_THRESHOLD_BYTES, _NEVER_TRIM = 32 << 20, -1
_THRESHOLDS = ("trim_threshold", "mmap_threshold", "top_pad")
"""Settings that a user may have made: `MALLOC_TOP_PAD_` in the environment, or the tunable `glibc.malloc.top_pad`."""


def trim_heap() -> None:
    """Return the free memory of the heap to the system with `malloc_trim`, if the C library has it."""
    if (trim := libc_function("malloc_trim")) is not None:
        trim(0)


@cache
def coalesces_freed_blocks() -> bool:
    """True if glibc merges a freed aligned block with the bytes that were cut off to align it, as from 2.39 on."""
    return COALESCING_TUNABLE in _tunables().split(":") or _glibc_version() >= _COALESCES_SINCE


def fragments_heap() -> bool:
    """True if the C library is a glibc that fragments its heap."""
    return bool(_glibc_version()) and not coalesces_freed_blocks()


def disable_trimming() -> bool:
    """Let the heap keep freed blocks for the next step, unless a user has set thresholds; returns True if it will."""
    tunables = _tunables()
    is_set = any(f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}" in tunables for name in _THRESHOLDS)
    return not is_set and _set_thresholds(_MAX_MMAP_THRESHOLD_BYTES, _NEVER_TRIM)


@cache
def libc_function(name: str) -> ctypes._NamedFuncPointer | None:
    """Returns a function of the C library; None if it has none of this name."""
    with suppress(OSError, AttributeError, TypeError):  # on Windows, loaded libraries cannot be searched
        function: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
        return function
    return None


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> bool:
    mallopt = libc_function("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, mmap_bytes)) and bool(mallopt(_M_TRIM_THRESHOLD, trim_bytes))


def _tunables() -> str:
    return os.environ.get("GLIBC_TUNABLES", "")


def _glibc_version() -> tuple[int, ...]:
    """Returns the version of glibc; an empty tuple for another C library."""
    with suppress(AttributeError, ValueError, OSError):  # Windows has no confstr; macOS and musl lack this name
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return tuple(map(int, version.split("."))) if name == "glibc" else ()
    return ()
