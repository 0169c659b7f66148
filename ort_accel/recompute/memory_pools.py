"""Live values and peaks of the two memory pools of a step: ONNX Runtime's arena and PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from ort_accel.recompute.ort_arena_model import Arena
from ort_accel.reporting import Runner

WORKSPACE = "working memory"
"""Stands among the names of values for the workspace of an operator."""


@dataclass(frozen=True)
class Moment:
    """The state of one pool, or of both, at one moment of a step."""

    live: Mapping[str, int]
    """Bytes of the live values, by name."""
    bytes: int
    """Bytes that are held."""
    is_used: Callable[[str], bool] = lambda _: False
    """True for a value that is in use at this moment. Recomputing it would not free memory."""

    @property
    def idle(self) -> set[str]:
        """Live values that no operator uses at this moment."""
        return {name for name in self.live if not self.is_used(name)}


class Pools:
    """Values that own storage, with their bytes, by pool."""

    def __init__(self, shared: bool = False) -> None:
        """`shared` says that ONNX Runtime allocates from PyTorch's pool and frees memory there."""
        self._shared = shared
        self.peaks = {runner: Moment({}, 0) for runner in Runner}
        """The moment of each pool at which it holds most."""
        self.joint_peak = Moment({}, 0)
        """The moment at which both pools together hold most."""
        self.is_used = Moment.is_used
        """True for a value that the running operator uses, or that earlier and later operators use."""
        self._live: dict[Runner, dict[str, int]] = {runner: {} for runner in Runner}
        self._bytes = dict.fromkeys(Runner, 0)
        self._arena = Arena()

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._live.values())

    @property
    def live_bytes(self) -> int:
        """Bytes of all live values."""
        return sum(self._bytes.values())

    @property
    def live(self) -> dict[str, int]:
        """Bytes of each live value."""
        return {name: size for values in self._live.values() for name, size in values.items()}

    @property
    def ort_live_bytes(self) -> int:
        """Bytes of the live values in ONNX Runtime's pool."""
        return self._bytes[Runner.ORT]

    @property
    def torch_live_bytes(self) -> int:
        """Bytes of the live values in PyTorch's pool."""
        return self._bytes[Runner.PYTORCH]

    @property
    def ort_held_bytes(self) -> int:
        """Bytes that ONNX Runtime's pool holds."""
        return self.ort_live_bytes if self._shared else self._arena.held_bytes

    def ort_size(self, name: str) -> int | None:
        """Returns the bytes of a value in ONNX Runtime's pool; None for other values."""
        return self._live[Runner.ORT].get(name)

    def add(self, name: str, size: int, pool: Runner) -> None:
        """Allocate a value."""
        self._live[pool][name] = size
        self._bytes[pool] += size
        if pool is Runner.ORT:
            self._arena.allocate(name, size)
        ort, torch = self.ort_held_bytes, self.torch_live_bytes
        held = ort if pool is Runner.ORT else torch
        if held > self.peaks[pool].bytes:
            self.peaks[pool] = Moment(dict(self._live[pool]), held, self.is_used)
        if ort + torch > self.joint_peak.bytes:
            self.joint_peak = Moment(self.live, ort + torch, self.is_used)

    def shrink(self) -> None:
        """Let ONNX Runtime's pool return its free regions."""
        self._arena.shrink()

    def replace(self, name: str, by: str) -> None:
        """Give the storage of a value to another, which is computed in place."""
        if name in self._live[Runner.ORT]:
            self._arena.transfer(name, by)
        for values in self._live.values():
            if name in values:
                values[by] = values.pop(name)

    def drop(self, names: Iterable[str]) -> None:
        """Free these values, if they are live."""
        for name in names:
            if name in self._live[Runner.ORT]:
                self._arena.free(name)
            for pool in Runner:
                self._bytes[pool] -= self._live[pool].pop(name, 0)
