"""What is alive in the two pools of memory of a step, ONNX Runtime's and PyTorch's, and the most that they held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from ort_accel.recompute.ort_arena_model import Arena
from ort_accel.reporting import Runner

BORROWED = "working memory"
"""What an operator takes for itself, among the names of values."""


@dataclass(frozen=True)
class Moment:
    """One moment of a step, as one pool of memory sees it, or both."""

    live: Mapping[str, int]
    """What was computed into it and is still there."""
    bytes: int
    """What is held."""
    is_used: Callable[[str], bool] = lambda _: False
    """Whether a value is worked with then: it would be there even if it were computed again."""

    @property
    def idle(self) -> set[str]:
        """What is there and only waits."""
        return {name for name in self.live if not self.is_used(name)}


class Pools:
    """Names of values that own memory, with their bytes, by pool."""

    def __init__(self, shared: bool = False) -> None:
        """`shared` says that ONNX Runtime takes its memory from PyTorch's pool, and gives it back there."""
        self._shared = shared
        self.highest = {runner: Moment({}, 0) for runner in Runner}
        """The moment of each pool at which it holds most."""
        self.together = Moment({}, 0)
        """The moment at which both hold most."""
        self.is_used = Moment.is_used
        """Tells what is worked with now."""
        self._live: dict[Runner, dict[str, int]] = {runner: {} for runner in Runner}
        self._bytes = dict.fromkeys(Runner, 0)
        self._arena = Arena()

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._live.values())

    @property
    def bytes(self) -> int:
        """How much is alive."""
        return sum(self._bytes.values())

    @property
    def live(self) -> dict[str, int]:
        """What is alive."""
        return {name: size for values in self._live.values() for name, size in values.items()}

    @property
    def in_ort(self) -> int:
        """How much is alive in ONNX Runtime's pool."""
        return self._bytes[Runner.ORT]

    @property
    def in_pytorch(self) -> int:
        """How much is alive in PyTorch's pool."""
        return self._bytes[Runner.PYTORCH]

    @property
    def held(self) -> int:
        """How much ONNX Runtime holds."""
        return self.in_ort if self._shared else self._arena.held

    def size_in_ort(self, name: str) -> int | None:
        """The bytes of a value in ONNX Runtime's pool; None for others."""
        return self._live[Runner.ORT].get(name)

    def add(self, name: str, size: int, pool: Runner) -> None:
        """A value comes into being."""
        self._live[pool][name] = size
        self._bytes[pool] += size
        if pool is Runner.ORT:
            self._arena.take(name, size)
        ort, torch = self.held, self.in_pytorch
        held = ort if pool is Runner.ORT else torch
        if held > self.highest[pool].bytes:
            self.highest[pool] = Moment(dict(self._live[pool]), held, self.is_used)
        if ort + torch > self.together.bytes:
            self.together = Moment(self.live, ort + torch, self.is_used)

    def shrink(self) -> None:
        """ONNX Runtime's pool gives back what it can."""
        self._arena.shrink()

    def replace(self, name: str, by: str) -> None:
        """A value comes into being where another one was."""
        if name in self._live[Runner.ORT]:
            self._arena.hand_on(name, by)
        for values in self._live.values():
            if name in values:
                values[by] = values.pop(name)

    def drop(self, names: Iterable[str]) -> None:
        """Values are let go, where they are here."""
        for name in names:
            if name in self._live[Runner.ORT]:
                self._arena.give(name)
            for pool in Runner:
                self._bytes[pool] -= self._live[pool].pop(name, 0)
