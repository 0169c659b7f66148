"""What the inputs of a graph tell before it runs: masks, labels, and where sequences end."""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.graph.nodes import is_part, is_random, op_name, writes
from ort_accel.graph.requires_grad import has_gradient

HEAVY = ("linear", "mm", "matmul", "convolution", "scaled_dot_product", "layer_norm")


def known_in_front(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that can be computed from the inputs alone, cheaply, with nothing drawn or differentiated."""
    known: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_known(node, known):
            known.add(node)
    return known


def _is_known(node: fx.Node, known: set[fx.Node]) -> bool:
    if node.op in {"placeholder", "get_attr"}:
        return True
    if node.op != "call_function" or any(given not in known or has_gradient(given) for given in node.all_input_nodes):
        return False
    name = op_name(node)
    plain = is_part(node) or not writes(node) or isinstance(node.target, torch._ops.OpOverload)
    is_python = getattr(node.target, "__module__", "") in {"_operator", "math"}
    return (plain or is_python) and not is_random(node) and not any(part in name for part in HEAVY)
