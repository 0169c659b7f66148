"""Computing again in the backward what the forward need not keep, as late as possible.

A view is always taken again: it costs nothing, and what it looks at is kept in its place. A view that shows only some
of what it looks at (a selection) is kept as it is, since its source can be far larger, unless that is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import fx

from ort_accel.graph.meta_keys import PARTITIONER_TAG, RUNS_AFTER
from ort_accel.graph.nodes import is_part, is_returned, is_size, is_view
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.recompute.joint_graph import backward_nodes, owner, whole


def compute_again(joint: fx.Graph, chosen: Collection[fx.Node] = ()) -> list[fx.Node]:
    """Let the backward take its views anew and compute the chosen operators of the forward again, where it needs them.

    Returns the copies of chosen operators, named `..._recompute`. Each stands right before its first reader and waits
    for what that reader waits for, so that the values come into being no sooner than they are used.
    """
    backward = backward_nodes(joint)
    inside, operators = set(backward), set(chosen)
    late: set[fx.Node] = set()
    """The backward's own views of what is computed again: they wait, too, for the reader behind them."""
    place = {node: index for index, node in enumerate(joint.nodes)}
    copies: dict[fx.Node, fx.Node] = {}
    made: list[fx.Node] = []

    def is_again(node: fx.Node) -> bool:
        if node in inside:
            return node in late
        return node.op == "get_attr" or whole(node) in operators or _is_retaken(node, operators)

    for reader in backward:
        wanted = [item for item in reader.all_input_nodes if is_again(item)]
        if wanted and _only_looks(reader, wanted):
            late.add(reader)
            continue
        needed = _needed(wanted, is_again, copies)
        waits = _sources(reader, inside)
        for node in sorted(needed, key=place.__getitem__):
            with joint.inserting_before(reader):
                copy = copies[node] = _copy(joint, node, copies, "_recompute" if node in operators else "_again")
            if node in operators:
                copy.meta[RUNS_AFTER] = waits
                made.append(copy)
        for item in wanted:
            reader.replace_input_with(item, copies[item])
    for node in reversed(backward):
        if node in late and not node.users:
            joint.erase_node(node)
    return made


def _only_looks(reader: fx.Node, wanted: Sequence[fx.Node]) -> bool:
    """Whether a node of the backward is but a view of what comes from the forward, for others in the backward."""
    is_look = is_view(reader) or (is_part(reader) and is_view(whole(reader)))
    sizes = sum(is_size(item) for item in reader.all_input_nodes)
    return is_look and not is_returned(reader) and len(wanted) + sizes == len(reader.all_input_nodes)


def _needed(
    wanted: Sequence[fx.Node], is_again: Callable[[fx.Node], bool], copies: dict[fx.Node, fx.Node]
) -> set[fx.Node]:
    """What has to be copied for these values, and is not yet."""
    found: set[fx.Node] = set()
    pending = list(wanted)
    while pending:
        node = pending.pop()
        if node in found or node in copies:
            continue
        found.add(node)
        pending += [item for item in node.all_input_nodes if is_again(item)]
    return found


def _copy(joint: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], suffix: str) -> fx.Node:
    def copied(item: fx.Node) -> fx.Node:
        return copies.get(item, item)

    args, kwargs = fx.map_arg(node.args, copied), fx.map_arg(node.kwargs, copied)
    copy = joint.create_node(node.op, node.target, args, kwargs, f"{node.name}{suffix}", node.type)
    copy.meta = {**node.meta, PARTITIONER_TAG: "is_backward"}
    return copy


def _sources(reader: fx.Node, inside: set[fx.Node]) -> tuple[str, ...]:
    """The names of the backward's operators that a reader waits for, seen through views."""
    found: dict[str, None] = {}
    pending = list(reader.all_input_nodes)
    while pending:
        item = whole(pending.pop())
        if item not in inside or is_size(item):
            continue
        if is_view(item):
            pending += item.all_input_nodes
        else:
            found[item.name] = None
    return tuple(found)


def _is_retaken(node: fx.Node, operators: set[fx.Node]) -> bool:
    """Whether a node is a view that is taken again: one of all of its source, or of what is computed again."""
    if is_part(node):
        return is_view(node.args[0]) and _is_retaken(node.args[0], operators)  # type: ignore[arg-type]
    if not is_view(node):
        return False
    if whole(owner(node)) in operators:
        return True
    value, source = node.meta["val"], node.all_input_nodes[0]
    if source.op == "placeholder" or isinstance(value, tuple | list):
        return True
    return expression(value.numel()) == expression(source.meta["val"].numel())
