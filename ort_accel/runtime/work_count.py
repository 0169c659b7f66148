"""Counts the floating point operations of compiled graphs as they run, while somebody asks for it."""

from __future__ import annotations


class WorkCount:
    """The operations since counting began. Off, it costs a look at one attribute for each run of a graph."""

    def __init__(self) -> None:
        self.is_on = False
        self._flops = 0
        self._missed = False

    def begin(self) -> None:
        """Begin to count."""
        self.is_on, self._flops, self._missed = True, 0, False

    def add(self, flops: int) -> None:
        """Count the operations of one run of a graph."""
        self._flops += flops

    def missed(self) -> None:
        """Note that eager mode ran something, whose operations nobody counts."""
        self._missed = True

    def end(self) -> int | None:
        """Returns the operations since counting began; None if they are not all known. Counts no more."""
        self.is_on = False
        return None if self._missed or not self._flops else self._flops


WORK = WorkCount()
"""The count of this process."""
