"""Removes clones that make no difference. A dropout with probability zero is captured as a clone."""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.passes.common import pinned_tensors, strides_of, tensors_behind
from ort_accel.passes.options import PassOptions

CLONE = torch.ops.aten.clone.default


def remove_clones(graph: fx.Graph, _: PassOptions) -> int:
    """Replace clones by their sources; returns how many.

    1. A clone with other strides than its source stays.
    2. A clone stays if the graph returns or mutates it or its source.
    3. A clone of a graph input stays, since the input can change before the backward runs.
    """
    pinned = pinned_tensors(graph)
    needless = [node for node in graph.find_nodes(op="call_function", target=CLONE) if _is_needless(node, pinned)]
    for node in needless:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
    return len(needless)


def _is_needless(clone: fx.Node, pinned: set[fx.Node]) -> bool:
    tensors = [item for item in tensors_behind(clone) if isinstance(item.meta.get("val"), torch.Tensor)]
    is_computed_here = all(item.op == "call_function" for item in tensors)
    has_same_strides = strides_of(clone.meta["val"]) == strides_of(clone.all_input_nodes[0].meta["val"])
    return is_computed_here and has_same_strides and pinned.isdisjoint([clone, *tensors])
