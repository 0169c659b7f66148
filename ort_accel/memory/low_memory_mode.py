"""Low memory mode: trims the C library's heap when the resident set would grow."""

from __future__ import annotations

from ort_accel.memory.malloc_settings import trim_heap
from ort_accel.memory.process_memory import resident_now

ALLOWED_GROWTH = 1.05
"""The resident set may reach this many times its size after the last trim."""


class TrimOnGrowth:
    """Trims the heap when it is called and the resident set exceeds its limit.

    Freed blocks stay in the heap for later ones, which is fast, but glibc leaves gaps that only smaller blocks fit. If
    glibc returned large blocks as soon as they are freed, each step would fault the same pages in again.
    """

    def __init__(self) -> None:
        self._limit_bytes = 0.0

    def __call__(self) -> None:
        """Trim the heap if the resident set exceeds its limit, and set a new limit."""
        if resident_now() > self._limit_bytes:
            trim_heap()
            self._limit_bytes = ALLOWED_GROWTH * resident_now()
