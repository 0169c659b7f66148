"""The live values of a step, and the moment at which they take most memory.

ONNX Runtime and PyTorch both allocate from the C library, or on a CUDA device from PyTorch's pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

WORKSPACE = "working memory"
"""Stands among the names of values for the workspace of an operator."""


@dataclass(frozen=True)
class Moment:
    """The live values at one moment of a step."""

    live: Mapping[str, int]
    """Bytes of the live values, by name."""
    bytes: int
    """Bytes of all of them."""
    is_used: Callable[[str], bool] = lambda _: False
    """True for a value that is in use at this moment. Recomputing it would not free memory."""

    @property
    def idle(self) -> set[str]:
        """Live values that no operator uses at this moment."""
        return {name for name in self.live if not self.is_used(name)}


class LiveMemory:
    """Values that own storage, with their bytes."""

    def __init__(self) -> None:
        self.peak = Moment({}, 0)
        """The moment at which the values take most memory."""
        self.is_used = Moment.is_used
        """True for a value that the running operator uses, or that earlier and later operators use."""
        self.bytes = 0
        """Bytes of all live values."""
        self._live: dict[str, int] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    @property
    def live(self) -> dict[str, int]:
        """Bytes of each live value."""
        return dict(self._live)

    def size(self, name: str) -> int | None:
        """Returns the bytes of a live value; None for other values."""
        return self._live.get(name)

    def add(self, name: str, size: int) -> None:
        """Allocate a value."""
        self._live[name] = size
        self.bytes += size
        if self.bytes > self.peak.bytes:
            self.peak = Moment(self.live, self.bytes, self.is_used)

    def replace(self, name: str, by: str) -> None:
        """Give the storage of a value to another, which is computed in place."""
        if name in self._live:
            self._live[by] = self._live.pop(name)

    def drop(self, names: Iterable[str]) -> None:
        """Free these values, if they are live."""
        for name in names:
            self.bytes -= self._live.pop(name, 0)
