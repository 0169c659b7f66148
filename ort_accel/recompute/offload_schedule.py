"""Schedules when values are offloaded to host memory and prefetched, and predicts the stall of a step.

Times are those of the cost model. Copies start and finish at sync points, and run one after the other. Sync points are
few, since each one ends a segment of ONNX Runtime.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

LINK_BYTES_PER_MS = 50e3
"""Bandwidth of copies on the clock of the cost model. It stands for a 25 GB/s link beside 100 TFLOP/s."""

COPY_GROUPS = 8
"""Values are copied in about this many groups of equal size."""

_NamesByNode = defaultdict[int, list[str]]


@dataclass(frozen=True)
class PassTiming:
    """Times of the nodes of a forward or backward pass, and where offloaded values enter or leave it."""

    starts_ms: Sequence[float]
    """The start time of each node, and last the end time of the pass."""
    boundary: Mapping[str, int]
    """For each value, the first node after its last reader in the forward, or its first reader in the backward."""


@dataclass(frozen=True)
class SyncPoint:
    """A point before a node at which copies start or must have finished."""

    node: int
    started: tuple[str, ...]
    finished: tuple[str, ...]


def copy_ms(names: Iterable[str], sizes: Mapping[str, int]) -> float:
    """Returns the milliseconds that copies of these values take, one after the other."""
    return sum(sizes[name] for name in names) / LINK_BYTES_PER_MS


def schedule_offload(timing: PassTiming, sizes: Mapping[str, int]) -> list[SyncPoint]:
    """Returns the sync points of a forward. Copies start after the last reader, and finish within the forward."""
    started, finished = _NamesByNode(list), _NamesByNode(list)
    link_free_ms = 0.0
    for group in _groups(timing, sizes):
        node = max(timing.boundary[name] for name in group)
        link_free_ms = max(timing.starts_ms[node], link_free_ms) + copy_ms(group, sizes)
        started[node] += group
        finished[min(bisect_left(timing.starts_ms, link_free_ms), len(timing.starts_ms) - 1)] += group
    return _sync_points(started, finished)


def schedule_prefetch(timing: PassTiming, sizes: Mapping[str, int]) -> list[SyncPoint]:
    """Returns the sync points of a backward. Copies finish at the first reader, and start as late as that allows."""
    started, finished = _NamesByNode(list), _NamesByNode(list)
    link_busy_ms = timing.starts_ms[-1]
    for group in reversed(list(_groups(timing, sizes))):
        node = min(timing.boundary[name] for name in group)
        link_busy_ms = min(timing.starts_ms[node], link_busy_ms) - copy_ms(group, sizes)
        start = max(bisect_right(timing.starts_ms, link_busy_ms) - 1, 0)
        started[start][:0] = group
        finished[node][:0] = group
    return _sync_points(started, finished)


def stall_ms(timing: PassTiming, sync_points: Sequence[SyncPoint], sizes: Mapping[str, int]) -> float:
    """Returns the milliseconds that a pass waits for copies."""
    stalled = link_free_ms = 0.0
    ends: dict[str, float] = {}
    for point in sync_points:
        now = timing.starts_ms[point.node] + stalled
        for name in point.started:
            link_free_ms = ends[name] = max(now, link_free_ms) + copy_ms([name], sizes)
        stalled += max((ends[name] - now for name in point.finished if ends[name] > now), default=0.0)
    return stalled


def _sync_points(started: _NamesByNode, finished: _NamesByNode) -> list[SyncPoint]:
    nodes = sorted({*started, *finished})
    return [SyncPoint(node, tuple(started[node]), tuple(finished[node])) for node in nodes]


def _groups(timing: PassTiming, sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields the values in the order of their boundaries, in groups of about equal size."""
    group_bytes = sum(sizes.values()) / COPY_GROUPS
    group: list[str] = []
    held = 0
    for name in sorted(sizes, key=timing.boundary.__getitem__):
        group.append(name)
        held += sizes[name]
        if held >= group_bytes:
            yield group
            group, held = [], 0
    if group:
        yield group
