"""Inserts recomputed operators into the backward of a joint graph, as late as possible.

The backward recomputes every view, since a view costs nothing: its source is saved instead. A selection is saved as it
is, because its source can be far larger, unless that source is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import fx

from ort_accel.graph.meta_keys import PARTITIONER_TAG, RUNS_AFTER
from ort_accel.graph.nodes import is_getitem, is_returned, is_size, is_view
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.recompute.joint_graph import backward_nodes, producer, storage_owner


def insert_recompute(joint: fx.Graph, recomputed: Collection[fx.Node] = ()) -> list[fx.Node]:
    """Let the backward recompute its views and the given operators of the forward before it reads them.

    Returns the copies of the operators, named `..._recompute`. A copy stands right before its first reader and runs
    after the operators that its reader depends on. Its value then lives as short as possible.
    """
    backward = backward_nodes(joint)
    inside, operators = set(backward), set(recomputed)
    delayed_views: set[fx.Node] = set()
    """Views in the backward of recomputed values: they are recomputed for their own readers."""
    position = {node: index for index, node in enumerate(joint.nodes)}
    copies: dict[fx.Node, fx.Node] = {}
    inserted: list[fx.Node] = []

    def is_recomputed(node: fx.Node) -> bool:
        if node in inside:
            return node in delayed_views
        return node.op == "get_attr" or producer(node) in operators or _is_recomputed_view(node, operators)

    for reader in backward:
        wanted = [item for item in reader.all_input_nodes if is_recomputed(item)]
        if wanted and _only_views(reader, wanted):
            delayed_views.add(reader)
            continue
        missing = _missing_copies(wanted, is_recomputed, copies)
        dependencies = _dependencies(reader, inside)
        for node in sorted(missing, key=position.__getitem__):
            with joint.inserting_before(reader):
                copy = copies[node] = _copy(joint, node, copies, "_recompute" if node in operators else "_again")
            if node in operators:
                copy.meta[RUNS_AFTER] = dependencies
                inserted.append(copy)
        for item in wanted:
            reader.replace_input_with(item, copies[item])
    for node in reversed(backward):
        if node in delayed_views and not node.users:
            joint.erase_node(node)
    return inserted


def _only_views(reader: fx.Node, wanted: Sequence[fx.Node]) -> bool:
    """True if a backward node is a view of forward values alone, and other backward nodes read it."""
    views = is_view(reader) or (is_getitem(reader) and is_view(producer(reader)))
    sizes = sum(is_size(item) for item in reader.all_input_nodes)
    return views and not is_returned(reader) and len(wanted) + sizes == len(reader.all_input_nodes)


def _missing_copies(
    wanted: Sequence[fx.Node], is_recomputed: Callable[[fx.Node], bool], copies: dict[fx.Node, fx.Node]
) -> set[fx.Node]:
    """Returns the nodes that these values need and that have no copy yet."""
    found: set[fx.Node] = set()
    pending = list(wanted)
    while pending:
        node = pending.pop()
        if node in found or node in copies:
            continue
        found.add(node)
        pending += [item for item in node.all_input_nodes if is_recomputed(item)]
    return found


def _copy(joint: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], suffix: str) -> fx.Node:
    def copied(item: fx.Node) -> fx.Node:
        return copies.get(item, item)

    args, kwargs = fx.map_arg(node.args, copied), fx.map_arg(node.kwargs, copied)
    copy = joint.create_node(node.op, node.target, args, kwargs, f"{node.name}{suffix}", node.type)
    copy.meta = {**node.meta, PARTITIONER_TAG: "is_backward"}
    return copy


def _dependencies(reader: fx.Node, inside: set[fx.Node]) -> tuple[str, ...]:
    """Returns the names of the backward operators that a reader depends on, seen through views."""
    found: dict[str, None] = {}
    pending = list(reader.all_input_nodes)
    while pending:
        item = producer(pending.pop())
        if item not in inside or is_size(item):
            continue
        if is_view(item):
            pending += item.all_input_nodes
        else:
            found[item.name] = None
    return tuple(found)


def _is_recomputed_view(node: fx.Node, operators: set[fx.Node]) -> bool:
    """True for a view of all elements of its source, or of a recomputed value."""
    if is_getitem(node):
        return is_view(node.args[0]) and _is_recomputed_view(node.args[0], operators)  # type: ignore[arg-type]
    if not is_view(node):
        return False
    if producer(storage_owner(node)) in operators:
        return True
    value, source = node.meta["val"], node.all_input_nodes[0]
    if source.op == "placeholder" or isinstance(value, tuple | list):
        return True
    return expression(value.numel()) == expression(source.meta["val"].numel())
