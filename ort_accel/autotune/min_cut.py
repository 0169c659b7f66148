"""Finds the division of a graph that costs least, as a minimum cut."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

SOURCE, SINK = "run by ONNX Runtime", "run by PyTorch"

NodeT = TypeVar("NodeT", bound=Hashable)


@dataclass(frozen=True)
class Costs:
    """Seconds that a node takes on either side; infinity where that side cannot run it."""

    ort: float
    pytorch: float


def cheapest(costs: Mapping[NodeT, Costs], readers: Mapping[NodeT, Iterable[NodeT]], price: float) -> set[NodeT]:
    """Returns the nodes that PyTorch should run, when handing a node's results to the other side costs `price`, once.

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
    """A maximum flow from SOURCE to SINK, by Dinic's algorithm."""

    def __init__(self) -> None:
        self._capacity: dict[Hashable, dict[Hashable, float]] = {SOURCE: {}, SINK: {}}
        self._level: dict[Hashable, int] = {}

    def connect(self, one: Hashable, other: Hashable, capacity: float) -> None:
        self._capacity.setdefault(one, {})[other] = capacity
        self._capacity.setdefault(other, {}).setdefault(one, 0.0)

    def reachable(self) -> set[Hashable]:
        """Returns the vertices that SOURCE still reaches: its side of the cut."""
        self._level = {SOURCE: 0}
        pending = deque[Hashable]([SOURCE])
        while pending:
            vertex = pending.popleft()
            for following, capacity in self._capacity[vertex].items():
                if capacity > 0 and following not in self._level:
                    self._level[following] = self._level[vertex] + 1
                    pending.append(following)
        return set(self._level)

    def saturate(self) -> None:
        """Sends as much flow as fits."""
        while SINK in self.reachable():
            untried = {vertex: list(edges) for vertex, edges in self._capacity.items()}
            while path := self._path(untried):
                amount = min(self._capacity[one][other] for one, other in path)
                for one, other in path:
                    self._capacity[one][other] -= amount
                    self._capacity[other][one] += amount

    def _path(self, untried: dict[Hashable, list[Hashable]]) -> list[tuple[Hashable, Hashable]]:
        """Returns one more path from SOURCE to SINK through the levels; an empty list if there is none."""
        path: list[tuple[Hashable, Hashable]] = []
        vertex: Hashable = SOURCE
        while vertex != SINK:
            edges = untried[vertex]
            while edges and not self._leads(vertex, edges[-1]):
                edges.pop()
            if edges:
                path.append((vertex, edges[-1]))
                vertex = edges[-1]
            elif path:
                vertex = path.pop()[0]
                untried[vertex].pop()  # a dead end
            else:
                return []
        return path

    def _leads(self, one: Hashable, other: Hashable) -> bool:
        return self._capacity[one][other] > 0 and self._level.get(other) == self._level[one] + 1
