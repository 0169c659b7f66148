"""Whose gradients a backward graph makes."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from ort_accel.graph.nodes import returned
from ort_accel.partition.split_at_gradients import Source
from ort_accel.recompute.joint_graph import owner


def gradients_of(forward: fx.GraphModule, backward: fx.GraphModule, kept_from: int) -> list[Source | None]:
    """For each output of the backward what it is the gradient of; `kept_from` tells where the forward's outputs end and
    what it keeps for the backward begins."""
    looking: defaultdict[str, set[str]] = defaultdict(set)
    for kept in returned(forward.graph)[kept_from:]:
        if isinstance(kept, fx.Node):
            looking[owner(kept).name].add(kept.name)
    given = forward.graph.find_nodes(op="placeholder")
    outputs = returned(backward.graph)
    if len(given) != len(outputs):  # inputs that AOTAutograd has put in, such as a generator's state
        return [None] * len(outputs)
    tensors = [node for node in given if isinstance(node.meta["val"], torch.Tensor)]
    edges = {node: edge for edge, node in enumerate(tensors)}
    return [Source(edges[node], frozenset(looking[node.name])) if node in edges else None for node in given]
