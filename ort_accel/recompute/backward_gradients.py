"""Maps the outputs of a backward graph to the forward inputs whose gradients they are."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from ort_accel.graph.nodes import returned
from ort_accel.partition.split_at_gradients import GradientSource
from ort_accel.recompute.joint_graph import is_tensor, storage_owner


def gradient_sources(forward: fx.GraphModule, backward: fx.GraphModule, kept_from: int) -> list[GradientSource | None]:
    """Returns the source of each output of the backward. Saved values are the forward's outputs from `kept_from` on."""
    saved_views: defaultdict[str, set[str]] = defaultdict(set)
    for saved in returned(forward.graph)[kept_from:]:
        if isinstance(saved, fx.Node):
            saved_views[storage_owner(saved).name].add(saved.name)
    inputs = forward.graph.find_nodes(op="placeholder")
    outputs = returned(backward.graph)
    if len(inputs) != len(outputs):  # AOTAutograd has added inputs, such as the state of a generator
        return [None] * len(outputs)
    edges = {node: edge for edge, node in enumerate(filter(is_tensor, inputs))}
    return [
        GradientSource(edges[node], frozenset(saved_views[node.name])) if node in edges else None for node in inputs
    ]
