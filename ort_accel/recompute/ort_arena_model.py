"""A model of ONNX Runtime's arena, a best-fit allocator that returns memory to the system only when it is shrunk.

The arena holds more than the live values: free chunks that fit no later value, and a table of its regions. The model
follows onnxruntime 1.19 to 1.31 with the extension strategy that grows by the requested size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count

UNIT_BYTES = 256
"""Chunks are multiples of this size."""
TABLE_BYTES_PER_UNIT = 8
MAX_DEAD_BYTES = 128 * 2**20
"""A chunk is split if half of it, or this many bytes, would stay unused."""


class _Chunk:
    """A stretch of memory with its neighbours in the same region."""

    __slots__ = ("next", "number", "previous", "size")

    def __init__(self, size: int, number: int) -> None:
        self.size, self.number = size, number
        self.previous: _Chunk | None = None
        self.next: _Chunk | None = None


class Arena:
    """The arena, with the name of the value in each used chunk."""

    def __init__(self) -> None:
        self.held_bytes = 0
        """Bytes that the arena has taken from the system."""
        self._used: dict[str, _Chunk] = {}
        self._free: list[tuple[int, int, _Chunk]] = []
        self._numbers: Iterator[int] = count()

    def allocate(self, name: str, size: int) -> None:
        """Allocate a chunk: the smallest free one that fits, or a new region."""
        size = max(-(-size // UNIT_BYTES), 1) * UNIT_BYTES
        index = bisect_left(self._free, (size, -1))
        if index == len(self._free):
            self.held_bytes += _region_bytes(size)
            self._used[name] = _Chunk(size, next(self._numbers))
            return
        chunk = self._free.pop(index)[-1]
        if chunk.size >= 2 * size or chunk.size - size >= MAX_DEAD_BYTES:
            self._split(chunk, size)
        self._used[name] = chunk

    def free(self, name: str) -> None:
        """Free a chunk and merge it with free neighbours."""
        chunk = self._used.pop(name)
        for other in (chunk.previous, chunk.next):
            if other is not None and self._is_free(other):
                self._free.remove((other.size, other.number, other))
                chunk = self._merge(*((other, chunk) if other is chunk.previous else (chunk, other)))
        insort(self._free, (chunk.size, chunk.number, chunk))

    def shrink(self) -> None:
        """Return the regions that are free as a whole to the system."""
        regions = [entry for entry in self._free if entry[-1].previous is None and entry[-1].next is None]
        self._free = [entry for entry in self._free if entry not in regions]
        self.held_bytes -= sum(_region_bytes(size) for size, _, _ in regions)

    def transfer(self, name: str, to: str) -> None:
        """Give the chunk of one value to another, which is computed in place."""
        self._used[to] = self._used.pop(name)

    def _is_free(self, chunk: _Chunk) -> bool:
        index = bisect_left(self._free, (chunk.size, chunk.number))
        return index < len(self._free) and self._free[index][-1] is chunk

    def _split(self, chunk: _Chunk, size: int) -> None:
        rest = _Chunk(chunk.size - size, next(self._numbers))
        rest.previous, rest.next, chunk.size = chunk, chunk.next, size
        if rest.next is not None:
            rest.next.previous = rest
        chunk.next = rest
        insort(self._free, (rest.size, rest.number, rest))

    def _merge(self, first: _Chunk, second: _Chunk) -> _Chunk:
        first.size += second.size
        first.next = second.next
        if first.next is not None:
            first.next.previous = first
        return first


def _region_bytes(size: int) -> int:
    return size + size // UNIT_BYTES * TABLE_BYTES_PER_UNIT
