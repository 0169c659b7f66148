"""When values go to host memory and come back, and how long a step waits for that.

Time is that of the cost model. The forward and the backward each have stations: places where copies are begun and where
earlier ones must have ended. Copies are made one after the other. There are few stations, since a segment of ONNX
Runtime ends at each, and values come out of it at its end only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

LINK_BYTES_PER_MS = 50e3
"""How fast copies are, on the clock of the cost model: a byte takes the time of 4,000 operations. So it is for a device
with a 16-lane PCI Express 4 link, 25 GB/s, that multiplies at 100 TFLOP/s."""

GROUPS = 8
"""Values go, and come back, in about so many groups of equal size."""

_Places = defaultdict[int, list[str]]


@dataclass(frozen=True)
class Way:
    """One half of a step, as far as values that are moved go."""

    clock: Sequence[float]
    """The time at which each node begins, and that at which the last one ends."""
    at: Mapping[str, int]
    """For each value the first node behind its last reader in the forward, or its first reader in the backward."""


@dataclass(frozen=True)
class Station:
    """A place in front of a node."""

    node: int
    begun: tuple[str, ...]
    """Values whose copy begins here."""
    ended: tuple[str, ...]
    """Values whose copy has to have ended here."""


def duration(names: Iterable[str], sizes: Mapping[str, int]) -> float:
    """The milliseconds that copies of these values take, one after the other."""
    return sum(sizes[name] for name in names) / LINK_BYTES_PER_MS


def leaving(way: Way, sizes: Mapping[str, int]) -> list[Station]:
    """The stations of a forward: values begin to leave behind their last reader, and are gone where their copies will
    have ended, at the latest when the forward has."""
    begun, ended = _Places(list), _Places(list)
    free = 0.0
    for group in _groups(way, sizes):
        node = max(way.at[name] for name in group)
        free = max(way.clock[node], free) + duration(group, sizes)
        begun[node] += group
        ended[min(bisect_left(way.clock, free), len(way.clock) - 1)] += group
    return _stations(begun, ended)


def coming(way: Way, sizes: Mapping[str, int]) -> list[Station]:
    """The stations of a backward: values are there for their first reader, and begin to come no sooner than they must
    so that it need not wait."""
    begun, ended = _Places(list), _Places(list)
    free = way.clock[-1]
    for group in reversed(list(_groups(way, sizes))):
        node = min(way.at[name] for name in group)
        free = min(way.clock[node], free) - duration(group, sizes)
        place = max(bisect_right(way.clock, free) - 1, 0)
        begun[place][:0] = group
        ended[node][:0] = group
    return _stations(begun, ended)


def waiting(way: Way, stations: Sequence[Station], sizes: Mapping[str, int]) -> float:
    """The milliseconds that what computes waits for copies."""
    waited = free = 0.0
    ends: dict[str, float] = {}
    for station in stations:
        now = way.clock[station.node] + waited
        for name in station.begun:
            free = ends[name] = max(now, free) + duration([name], sizes)
        waited += max((ends[name] - now for name in station.ended if ends[name] > now), default=0.0)
    return waited


def _stations(begun: _Places, ended: _Places) -> list[Station]:
    return [Station(node, tuple(begun[node]), tuple(ended[node])) for node in sorted({*begun, *ended})]


def _groups(way: Way, sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The values in the order of their places, in groups of about equal size."""
    most = sum(sizes.values()) / GROUPS
    group: list[str] = []
    held = 0
    for name in sorted(sizes, key=way.at.__getitem__):
        group.append(name)
        held += sizes[name]
        if held >= most:
            yield group
            group, held = [], 0
    if group:
        yield group
