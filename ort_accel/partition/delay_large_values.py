"""Large values of a backward are kept apart from what it computes again, so that they are not there at the same time.

Graphs are cut so that control changes hands rarely: what can run, runs. So the gradient of what a feed-forward part has
in its middle, say, is made before the layer is computed again, and waits for all of it. And what lives and dies within
a segment of ONNX Runtime lies in its pool, which keeps the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ort_accel.graph.meta_keys import OUTLIVES_GRAPH, RUNS_AFTER
from ort_accel.graph.nodes import bytes_made, is_random, writes
from ort_accel.kernels.host_copies import is_move
from ort_accel.partition.segments import Cut, has_a_place, seen_from
from ort_accel.reporting import Runner

LARGE = 1 << 20
"""Bytes. One more segment takes some ten microseconds, and to make so many bytes takes longer."""


def keep_apart(cuts: Sequence[Cut], free: set[fx.Node]) -> list[Cut]:
    """These cuts, with large values made as late, and let go as early, as more cuts allow. No more is alive at
    any moment for it, though ONNX Runtime's pool may divide otherwise. Graphs that compute nothing again stay as they
    are."""
    if not any(RUNS_AFTER in node.meta for cut in cuts for node in cut.nodes):
        return list(cuts)
    parting = _Parting(cuts, free)
    late = parting.late()
    found: list[Cut] = []
    for index, cut in enumerate(cuts):
        found += [Cut(cuts[parting.place[node]].runner, [node]) for node in late if late[node] == index]
        found += parting.without_tail(Cut(cut.runner, [node for node in cut.nodes if node not in late]))
    return found


class _Parting:
    """What is read where, seen through views."""

    def __init__(self, cuts: Sequence[Cut], free: set[fx.Node]) -> None:
        self._cuts = cuts
        self.place = {node: index for index, cut in enumerate(cuts) for node in cut.nodes}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        self._read = {node: seen_from(node, free) for node in self.place}
        for node, read in self._read.items():
            for item in read:
                self._readers.setdefault(item, []).append(node)
        self._returned = seen_from(cuts[0].nodes[0].graph.output_node(), free)
        copies = [bytes_made(node) for node in self.place if RUNS_AFTER in node.meta]
        self._large = max(LARGE, max(copies, default=0) / 2)
        self._fixed = {self.place[node] for node in self.place if writes(node) or is_move(node)}

    def late(self) -> dict[fx.Node, int]:
        """Large values that are made long before they are read, and before which cut that is."""
        found: dict[fx.Node, int] = {}
        for node, index in self.place.items():
            first = min(map(self.place.__getitem__, self._readers.get(node, ())), default=index)
            if first - index > 1 and self._can_wait(node, first):
                found[node] = first
        return found

    def _can_wait(self, node: fx.Node, first: int) -> bool:
        """Whether a value can be made right before a cut, of what is there until then in any case: ONNX Runtime holds
        what it was given until a cut ends, PyTorch lets go of it behind its last reader."""
        stays = has_a_place(node) or is_random(node) or RUNS_AFTER in node.meta or node in self._returned
        if stays or bytes_made(node) < self._large:
            return False
        if not self._fixed.isdisjoint(range(self.place[node], first)):
            return False
        until = first - 1 if self._cuts[first - 1].runner is Runner.ORT else first
        return all(self._is_there(item, node, until) for item in self._read[node])

    def _is_there(self, item: fx.Node, reader: fx.Node, until: int) -> bool:
        others = (self.place[other] for other in self._readers[item] if other is not reader)
        return OUTLIVES_GRAPH in item.meta or item in self._returned or max(others, default=-1) >= until

    def without_tail(self, cut: Cut) -> list[Cut]:
        """A cut, or two where one large value begins and ends within it and is read at its end, as the gradient of a
        weight reads what was computed again. It leaves the first cut, then, and lies in memory that can be freed."""
        inner = [node for node in cut.nodes if cut.runner is Runner.ORT and self._is_inner(node, cut)]
        tail = [node for node in cut.nodes if len(inner) == 1 and node in self._readers[inner[0]]]
        if not tail or not self._is_end(tail, cut):
            return [cut] if cut.nodes else []
        return [Cut(cut.runner, [node for node in cut.nodes if node not in tail]), Cut(cut.runner, tail)]

    def _is_inner(self, node: fx.Node, cut: Cut) -> bool:
        """Whether a large value begins and ends within a cut."""
        readers = set(self._readers.get(node, ()))
        is_read_here = bool(readers) and readers.issubset(cut.nodes)
        return is_read_here and bytes_made(node) >= self._large and node not in self._returned

    def _is_end(self, tail: Sequence[fx.Node], cut: Cut) -> bool:
        """Whether nothing large comes behind these in a cut, and nothing in it reads what they give."""
        others = [node for node in cut.nodes[cut.nodes.index(tail[0]) :] if node not in tail]
        given = [reader for node in tail for reader in self._readers.get(node, ())]
        return all(bytes_made(node) < self._large for node in others) and set(given).isdisjoint(cut.nodes)
