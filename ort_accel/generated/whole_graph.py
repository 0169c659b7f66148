"""Describes a whole segment, so that Inductor can compile it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ort_accel.executor.ort_segment import OrtSegment
from ort_accel.generated.clusters import is_free
from ort_accel.generated.description import NotDescribable, Part
from ort_accel.generated.replace import SegmentGraph
from ort_accel.graph.meta_keys import RUNS_AFTER
from ort_accel.graph.nodes import constant_of, is_getitem, is_size
from ort_accel.operators.facts import facts
from ort_accel.partition.segments import keeps_position


@dataclass(frozen=True)
class WholeGraph:
    """All of a segment, described. Its inputs are those of the segment, and then its constants."""

    source: str
    hints: dict[str, int]
    names: list[str]
    """The symbols' names in the graph, in the order of the description's symbols."""
    nodes: int
    """The number of nodes that compute something."""
    constants: list[torch.Tensor]


def whole_graph(segment: OrtSegment, graph: SegmentGraph) -> WholeGraph:
    """Returns all of a segment, described; raises `NotDescribable`."""
    nodes = [node for node in graph.body.nodes if node.op == "call_function" and not is_size(node)]
    for node in nodes:
        if is_getitem(node):
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NotDescribable(str(node.target))
        is_late = bool(node.meta.get(RUNS_AFTER)) and not (is_free(node) or facts(node).is_cheap)
        if is_late or keeps_position(node):
            raise NotDescribable("operators with an order, which Inductor would not keep")
    constants = [node for node in graph.body.nodes if node.op == "get_attr"]
    part = Part(nodes, [*segment.inputs, *constants], list(graph.wanted))
    part.describe()
    count = sum(not is_free(node) for node in nodes)
    return WholeGraph(part.source, part.hints, part.names, count, list(map(constant_of, constants)))
