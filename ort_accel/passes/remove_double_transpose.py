"""Views that lead back to where they came from: the transpose of a transpose is the tensor itself.

Autograd writes the gradient of each linear layer's weight as a transpose of a transpose, and reads the weight so in the
backward. Taking two views can take as long as a short kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_accel.graph.nodes import is_returned, order_of

aten = torch.ops.aten

TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}


def without_detours(graph: fx.Graph) -> int:
    """Read a tensor instead of the transpose of its transpose; returns how often."""
    count = 0
    for node in list(graph.nodes):
        if not _is_transpose(node) or not _is_transpose(inner := node.args[0]):
            continue
        back, order, source = order_of(inner), order_of(node), inner.args[0]
        if [back[place] for place in order] == sorted(order) and not _must_be_another(node, source):
            node.replace_all_uses_with(source)
            count += 1
    for node in reversed(graph.nodes):
        if not node.users and _is_transpose(node):
            graph.erase_node(node)
    return count


def _is_transpose(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in TRANSPOSES


def _must_be_another(node: fx.Node, source: fx.Node) -> bool:
    """Whether a graph returns a view of what it was given or returns itself: the caller expects two tensors."""
    return is_returned(node) and (source.op == "placeholder" or is_returned(source))
