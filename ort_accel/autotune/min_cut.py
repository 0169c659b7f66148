"""The division of a graph that costs least, as a minimum cut."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SOURCE, SINK = "run by ONNX Runtime", "run by PyTorch"


@dataclass(frozen=True)
class Costs:
    """What running a node takes on either side; infinity where that side cannot."""

    ort: float
    pytorch: float


def cheapest(costs: Mapping[Any, Costs], readers: Mapping[Any, Iterable[Any]], price: float) -> set[Any]:
    """The nodes that PyTorch should run, when handing a node's results to the other side costs `price`, once.

    `readers` names for each node the nodes that read its results.
    """
    network = _Network()
    for node, cost in costs.items():
        network.connect(SOURCE, node, cost.pytorch)
        network.connect(node, SINK, cost.ort)
    for node, others in readers.items():
        for other in others:
            network.connect(node, ("to PyTorch", node), price)
            network.connect(("to PyTorch", node), other, math.inf)
            network.connect(other, ("to ONNX Runtime", node), math.inf)
            network.connect(("to ONNX Runtime", node), node, price)
    network.saturate()
    return set(costs) - network.reachable()


class _Network:
    """Flow from SOURCE to SINK, by Dinic's algorithm."""

    def __init__(self) -> None:
        self._room: dict[Hashable, dict[Hashable, float]] = {SOURCE: {}, SINK: {}}
        self._level: dict[Hashable, int] = {}

    def connect(self, one: Hashable, other: Hashable, capacity: float) -> None:
        self._room.setdefault(one, {})[other] = capacity
        self._room.setdefault(other, {}).setdefault(one, 0.0)

    def reachable(self) -> set[Hashable]:
        """What is still reached from SOURCE: its side of the cut."""
        self._level = {SOURCE: 0}
        pending = deque[Hashable]([SOURCE])
        while pending:
            place = pending.popleft()
            for following, room in self._room[place].items():
                if room > 0 and following not in self._level:
                    self._level[following] = self._level[place] + 1
                    pending.append(following)
        return set(self._level)

    def saturate(self) -> None:
        """Send as much as fits."""
        while SINK in self.reachable():
            untried = {place: list(room) for place, room in self._room.items()}
            while path := self._path(untried):
                amount = min(self._room[one][other] for one, other in path)
                for one, other in path:
                    self._room[one][other] -= amount
                    self._room[other][one] += amount

    def _path(self, untried: dict[Hashable, list[Hashable]]) -> list[tuple[Hashable, Hashable]]:
        """One more way from SOURCE to SINK through the levels; empty if there is none."""
        path: list[tuple[Hashable, Hashable]] = []
        place: Hashable = SOURCE
        while place != SINK:
            ways = untried[place]
            while ways and not self._leads(place, ways[-1]):
                ways.pop()
            if ways:
                path.append((place, ways[-1]))
                place = ways[-1]
            elif path:
                place = path.pop()[0]
                untried[place].pop()  # a dead end
            else:
                return []
        return path

    def _leads(self, one: Hashable, other: Hashable) -> bool:
        return self._room[one][other] > 0 and self._level.get(other) == self._level[one] + 1
