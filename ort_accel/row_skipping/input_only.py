"""Finds the nodes that the inputs alone determine, so that masks and labels are known before the graph runs."""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.graph.nodes import is_part, is_random, op_name, writes
from ort_accel.graph.requires_grad import has_gradient

EXPENSIVE = ("linear", "mm", "matmul", "convolution", "scaled_dot_product", "layer_norm")


def input_only_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that are computed from inputs alone: cheap, deterministic, and from values without gradient."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_input_only(node, found):
            found.add(node)
    return found


def _is_input_only(node: fx.Node, found: set[fx.Node]) -> bool:
    if node.op in {"placeholder", "get_attr"}:
        return True
    if node.op != "call_function" or any(item not in found or has_gradient(item) for item in node.all_input_nodes):
        return False
    name = op_name(node)
    plain = is_part(node) or not writes(node) or isinstance(node.target, torch._ops.OpOverload)
    is_python = getattr(node.target, "__module__", "") in {"_operator", "math"}
    return (plain or is_python) and not is_random(node) and not any(part in name for part in EXPENSIVE)
