"""When values go to host memory and come back, and how long a step waits for that.

Time is that of the cost model. The forward and the backward each have stations: places where copies are begun and where
earlier ones must have ended. Copies are made one after the other. There are only so many stations, since a segment of
ONNX Runtime ends at each, and its values come out of it at its end only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LINK_BYTES_PER_MS = 50e3
"""How fast copies are, on the clock of the cost model: a byte takes the time of 4,000 operations. So it is for a device
with a 16-lane PCI Express 4 link, 25 GB/s, that multiplies at 100 TFLOP/s."""

STATIONS = 16
"""Values go, and come back, in about so many groups of equal size."""


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


def duration(size: int) -> float:
    """The milliseconds that a copy of so many bytes takes."""
    return size / LINK_BYTES_PER_MS


def leaving(way: Way, sizes: Mapping[str, int]) -> list[Station]:
    """The stations of a forward: values begin to leave behind their last reader, and are gone at the first station at
    which their copy will have ended."""
    stations: list[Station] = []
    under_way: dict[str, float] = {}
    free = 0.0
    for group in _groups(way, sizes):
        node = max(way.at[name] for name in group)
        now = way.clock[node]
        gone = [name for name, end in under_way.items() if end <= now]
        for name in gone:
            del under_way[name]
        for name in group:
            free = under_way[name] = max(now, free) + duration(sizes[name])
        stations.append(Station(node, tuple(group), tuple(gone)))
    return [*stations, Station(len(way.clock) - 1, (), tuple(under_way))] if under_way else stations


def coming(way: Way, sizes: Mapping[str, int]) -> list[Station]:
    """The stations of a backward: values are there for their first reader, and begin to come no sooner than they must
    so that it need not wait."""
    groups = list(_groups(way, sizes))
    nodes = [way.at[group[0]] for group in groups]
    begin: dict[int, list[str]] = {}
    free = float("inf")
    for place in reversed(range(len(groups))):
        needed = way.clock[nodes[place]]
        free = min(needed, free) - sum(duration(sizes[name]) for name in groups[place])
        before = [node for node in nodes[:place] if way.clock[node] <= free and node < nodes[place]]
        begin[max(before, default=0)] = groups[place] + begin.get(max(before, default=0), [])
    end: dict[int, list[str]] = {}
    for node, group in zip(nodes, groups, strict=True):
        end.setdefault(node, []).extend(group)
    places = sorted({*begin, *end})
    return [Station(node, tuple(begin.get(node, ())), tuple(end.get(node, ()))) for node in places]


def waiting(way: Way, stations: Sequence[Station], sizes: Mapping[str, int]) -> float:
    """The milliseconds that what computes waits for copies."""
    waited = free = 0.0
    ends: dict[str, float] = {}
    for station in stations:
        now = way.clock[station.node] + waited
        for name in station.begun:
            free = ends[name] = max(now, free) + duration(sizes[name])
        waited += max((ends[name] - now for name in station.ended if ends[name] > now), default=0.0)
    return waited


def _groups(way: Way, sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The values in the order of their places, in groups of about equal size."""
    most = sum(sizes.values()) / STATIONS
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
