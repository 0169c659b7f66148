"""Cuts a backward that recomputes so that its large values do not exist while the recomputation runs.

`cut` makes few segments: all nodes that can run, run. A gradient from the middle of a layer would then be made before
the layer is recomputed, and would wait for all of the recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ort_accel.graph.meta_keys import OUTLIVES_GRAPH, RUNS_AFTER
from ort_accel.graph.nodes import is_random, output_bytes, writes
from ort_accel.kernels.host_copies import is_host_copy
from ort_accel.partition.segments import Cut, keeps_position, values_read
from ort_accel.reporting.segments import Runner

LARGE_BYTES = 1 << 20
"""Size from which on a value takes longer to compute than one more segment costs."""


def delay_large_values(cuts: Sequence[Cut], free: set[fx.Node]) -> list[Cut]:
    """Returns segments that make large values as late, and free them as early, as more segments allow.

    The nodes never hold more at any moment for it. Graphs that recompute nothing stay as they are.
    """
    if not any(RUNS_AFTER in node.meta for cut in cuts for node in cut.nodes):
        return list(cuts)
    lifetimes = _Lifetimes(cuts, free)
    late = lifetimes.late()
    found: list[Cut] = []
    for index, cut in enumerate(cuts):
        found += [Cut(cuts[lifetimes.segment[node]].runner, [node]) for node in late if late[node] == index]
        found += lifetimes.without_tail(Cut(cut.runner, [node for node in cut.nodes if node not in late]))
    return found


class _Lifetimes:
    """The segments that make and read each value, seen through views."""

    def __init__(self, cuts: Sequence[Cut], free: set[fx.Node]) -> None:
        self._cuts = cuts
        self.segment = {node: index for index, cut in enumerate(cuts) for node in cut.nodes}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        self._read = {node: values_read(node, free) for node in self.segment}
        for node, read in self._read.items():
            for item in read:
                self._readers.setdefault(item, []).append(node)
        self._returned = values_read(cuts[0].nodes[0].graph.output_node(), free)
        recomputed_bytes = [output_bytes(node) for node in self.segment if RUNS_AFTER in node.meta]
        self._large_bytes = max(LARGE_BYTES, max(recomputed_bytes, default=0) / 2)
        self._fixed_segments = {self.segment[node] for node in self.segment if writes(node) or is_host_copy(node)}

    def late(self) -> dict[fx.Node, int]:
        """Returns large values that are made long before they are read, each with the segment that it may precede."""
        found: dict[fx.Node, int] = {}
        for node, index in self.segment.items():
            first = min(map(self.segment.__getitem__, self._readers.get(node, ())), default=index)
            if first - index > 1 and self._can_wait(node, first):
                found[node] = first
        return found

    def _can_wait(self, node: fx.Node, first_reader: int) -> bool:
        """True if a value can be made right before a segment from values that live until then in any case.

        ONNX Runtime holds its inputs until a segment ends; PyTorch frees an input behind its last reader.
        """
        is_bound = keeps_position(node) or is_random(node) or RUNS_AFTER in node.meta or node in self._returned
        if is_bound or output_bytes(node) < self._large_bytes:
            return False
        if not self._fixed_segments.isdisjoint(range(self.segment[node], first_reader)):
            return False
        until = first_reader - 1 if self._cuts[first_reader - 1].runner is Runner.ORT else first_reader
        return all(self._lives_until(until, item, node) for item in self._read[node])

    def _lives_until(self, segment: int, item: fx.Node, reader: fx.Node) -> bool:
        """True if a value lives until a segment for others than this reader."""
        others = (self.segment[other] for other in self._readers[item] if other is not reader)
        return OUTLIVES_GRAPH in item.meta or item in self._returned or max(others, default=-1) >= segment

    def without_tail(self, cut: Cut) -> list[Cut]:
        """Splits a segment in which one large value is made and is read at the end, as a weight's gradient reads one.

        The value then leaves the first segment, and lies in memory that can be freed.
        """
        inner = [node for node in cut.nodes if cut.runner is Runner.ORT and self._is_inner(node, cut)]
        tail = [node for node in cut.nodes if len(inner) == 1 and node in self._readers[inner[0]]]
        if not tail or not self._is_end(tail, cut):
            return [cut] if cut.nodes else []
        return [Cut(cut.runner, [node for node in cut.nodes if node not in tail]), Cut(cut.runner, tail)]

    def _is_inner(self, node: fx.Node, cut: Cut) -> bool:
        """True if only this segment reads a large value that it makes."""
        readers = set(self._readers.get(node, ()))
        is_read_here = bool(readers) and readers.issubset(cut.nodes)
        return is_read_here and output_bytes(node) >= self._large_bytes and node not in self._returned

    def _is_end(self, tail: Sequence[fx.Node], cut: Cut) -> bool:
        """True if nothing large follows the tail in its segment, and no node of the segment reads the tail."""
        others = [node for node in cut.nodes[cut.nodes.index(tail[0]) :] if node not in tail]
        readers = [reader for node in tail for reader in self._readers.get(node, ())]
        return all(output_bytes(node) < self._large_bytes for node in others) and set(readers).isdisjoint(cut.nodes)
