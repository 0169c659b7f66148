"""Views that lead back to where they came from: the transpose of a transpose is the tensor itself.

Autograd writes the gradient of each linear layer's weight as a transpose of a transpose, and reads the weight so in the
backward. Taking two views can take as long as a short kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def without_detours(graph: fx.Graph) -> int:
    """Read a tensor instead of the transpose of its transpose; returns how often."""
    count = 0
    for node in list(graph.nodes):
        if (order := _order(node)) and (back := _order(node.args[0])):
            source = node.args[0].args[0]
            if [back[place] for place in order] == sorted(order) and not _must_be_another(node, source):
                node.replace_all_uses_with(source)
                count += 1
    for node in reversed(graph.nodes):
        if not node.users and _order(node):
            graph.erase_node(node)
    return count


def _order(node: Any) -> list[int] | None:
    """Where each dimension of a transpose comes from; None for what is none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    order = list(range(value.ndim))
    match node.target, node.args:
        case aten.t.default, _:
            return order[::-1]
        case aten.transpose.int, (_, one, other):
            order[one], order[other] = order[other], order[one]
            return order
        case aten.permute.default, (_, places):
            return [order[place] for place in places]
    return None


def _must_be_another(node: fx.Node, source: fx.Node) -> bool:
    """Whether a graph returns a view of what it was given or returns itself: the caller expects two tensors."""
    return _is_returned(node) and (source.op == "placeholder" or _is_returned(source))


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
