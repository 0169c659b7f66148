"""Marks numbers that follow from the content of tensors, such as results of `.item()` and `nonzero` counts."""

from __future__ import annotations

from torch import fx

from ort_accel.graph.meta_keys import FROM_DATA
from ort_accel.graph.nodes import mark_data_dependent_scalars
from ort_accel.passes.options import PassOptions


def mark_data_numbers(graph: fx.Graph, _: PassOptions) -> int:
    """Set `FROM_DATA` in the meta of such numbers; returns how many there are."""
    mark_data_dependent_scalars(graph)
    return sum(FROM_DATA in node.meta for node in graph.nodes)
