"""How ONNX Runtime's pool of memory fills: it hands out the smallest free piece that fits, and gives nothing back
unless it is told to.

So within a step it holds more than what is alive: pieces that no later value fits, and a table with eight bytes for
each 256 that it has. The pool is followed as onnxruntime 1.19 to 1.31 keeps it where it grows by what is asked for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count

UNIT = 256
"""Pieces are whole multiples of so many bytes."""
TABLE = 8
"""Bytes in the pool's table for each unit."""
MOST_WASTED = 128 * 2**20
"""A piece is cut in two where half of it, or so much, would be left."""


class _Piece:
    """A stretch of memory, and its neighbours in what was got at once."""

    __slots__ = ("after", "before", "number", "size")

    def __init__(self, size: int, number: int) -> None:
        self.size, self.number = size, number
        self.before: _Piece | None = None
        self.after: _Piece | None = None


class Arena:
    """The pool, with a name for each piece that is in use."""

    def __init__(self) -> None:
        self.held = 0
        """Bytes that the pool has taken from the system."""
        self._used: dict[str, _Piece] = {}
        self._free: list[tuple[int, int, _Piece]] = []
        self._numbers: Iterator[int] = count()

    def take(self, name: str, size: int) -> None:
        """Hand out memory, from what is free where that fits."""
        size = max(-(-size // UNIT), 1) * UNIT
        index = bisect_left(self._free, (size, -1))
        if index == len(self._free):
            self.held += size + size // UNIT * TABLE
            self._used[name] = _Piece(size, next(self._numbers))
            return
        piece = self._free.pop(index)[-1]
        if piece.size >= 2 * size or piece.size - size >= MOST_WASTED:
            self._split(piece, size)
        self._used[name] = piece

    def give(self, name: str) -> None:
        """Take memory back, joined with what is free beside it."""
        piece = self._used.pop(name)
        for other in (piece.before, piece.after):
            if other is not None and self._is_free(other):
                self._free.remove((other.size, other.number, other))
                piece = self._joined(*((other, piece) if other is piece.before else (piece, other)))
        insort(self._free, (piece.size, piece.number, piece))

    def shrink(self) -> None:
        """Give back to the system what was got at once and is free as a whole."""
        whole = [entry for entry in self._free if entry[-1].before is None and entry[-1].after is None]
        self._free = [entry for entry in self._free if entry not in whole]
        self.held -= sum(size + size // UNIT * TABLE for size, _, _ in whole)

    def hand_on(self, name: str, to: str) -> None:
        """What was computed in place of another value has its memory."""
        self._used[to] = self._used.pop(name)

    def _is_free(self, piece: _Piece) -> bool:
        index = bisect_left(self._free, (piece.size, piece.number))
        return index < len(self._free) and self._free[index][-1] is piece

    def _split(self, piece: _Piece, size: int) -> None:
        rest = _Piece(piece.size - size, next(self._numbers))
        rest.before, rest.after, piece.size = piece, piece.after, size
        if rest.after is not None:
            rest.after.before = rest
        piece.after = rest
        insort(self._free, (rest.size, rest.number, rest))

    def _joined(self, first: _Piece, second: _Piece) -> _Piece:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first
