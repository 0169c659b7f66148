"""Views are not kept for the backward: what they look at is kept, and the backward looks again."""

from __future__ import annotations

from torch import fx

from ort_accel.lowering.nodes import is_part, is_view
from ort_accel.lowering.sizes import expression


def retake_views(joint: fx.GraphModule) -> int:
    """Let the backward part of a joint graph take its views anew; returns how many.

    A view that shows only some of what it looks at (a selection) is kept as it is: its source can be far larger.
    """
    backward = _backward_nodes(joint)
    if not backward:
        return 0
    inside = set(backward)
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node) -> fx.Node:
        """The node to read in place of this one, in the backward."""
        if node in inside or not _is_free(node):
            return node
        if node not in copies:
            with joint.graph.inserting_before(backward[0]):
                copies[node] = joint.graph.node_copy(node, again)
            copies[node].meta["partitioner_tag"] = "is_backward"
        return copies[node]

    for node in backward:
        for argument in node.all_input_nodes:
            if again(argument) is not argument:
                node.replace_input_with(argument, again(argument))
    return len(copies)


def _backward_nodes(joint: fx.GraphModule) -> list[fx.Node]:
    """The nodes behind the last one of the forward, as the partition sees it."""
    nodes = list(joint.graph.nodes)
    ends = [index for index, node in enumerate(nodes) if node.meta.get("partitioner_tag") == "is_forward"]
    first = max(ends, default=-1) + 1
    return [node for node in nodes[first:] if node.op == "call_function"]


def _is_free(node: fx.Node) -> bool:
    """Whether a node is a view of all of its source."""
    if is_part(node):
        return is_view(node.args[0])  # type: ignore[arg-type]
    if not is_view(node):
        return False
    value, source = node.meta["val"], node.all_input_nodes[0]
    if source.op == "placeholder" or isinstance(value, tuple | list):
        return True
    return expression(value.numel()) == expression(source.meta["val"].numel())
