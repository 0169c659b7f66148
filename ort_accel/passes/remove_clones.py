"""Copies that nobody needs. A dropout that drops nothing is captured as one, and eager mode makes none for it."""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.passes.remove_redundant_casts import fixed_in, seen_in, strides_of

COPY = torch.ops.aten.clone.default


def leave_out_copies(graph: fx.Graph) -> int:
    """Read what was copied in place of its copy; returns how often.

    A copy stays where it lies in memory in another way, where it or what it was made from is given back or changed, and
    where it was made from an input, which can change before the backward runs.
    """
    fixed = fixed_in(graph)
    needless = [node for node in graph.find_nodes(op="call_function", target=COPY) if _is_needless(node, fixed)]
    for node in needless:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
    return len(needless)


def _is_needless(copy: fx.Node, fixed: set[fx.Node]) -> bool:
    seen = [item for item in seen_in(copy) if isinstance(item.meta.get("val"), torch.Tensor)]
    is_made_here = all(item.op == "call_function" for item in seen)
    lies_alike = strides_of(copy.meta["val"]) == strides_of(copy.all_input_nodes[0].meta["val"])
    return is_made_here and lies_alike and fixed.isdisjoint([copy, *seen])
