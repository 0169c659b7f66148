"""`precision.cast_propagation`: casts that autocast put into a graph and that need not be made.

Nothing here changes a bit of the results: a tensor is cast into a type once instead of once for each reader, and a cast
into a wider type and back, with nothing but views between, is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_accel.graph.meta_keys import PARTITIONER_TAG, RECOMPUTE
from ort_accel.graph.nodes import is_part, is_view, writes
from ort_accel.graph.symbolic_sizes import expression

aten = torch.ops.aten

CAST = aten._to_copy.default

EXACT = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}
"""Casts that keep every value as it is, NaN and infinity too."""


def propagate_casts(graph: fx.Graph) -> int:
    """Leave out casts that are repeated or undone; returns how many."""
    fixed = fixed_in(graph)
    return _undo(graph, fixed) + _share(graph, fixed)


def _casts(graph: fx.Graph, fixed: set[fx.Node]) -> list[fx.Node]:
    """Casts that change a tensor's type only, and whose result nobody outside sees."""
    return [
        node
        for node in graph.find_nodes(op="call_function", target=CAST)
        if set(node.kwargs) <= {"dtype", "layout", "device"}
        and node.meta["val"].device == node.args[0].meta["val"].device
        and RECOMPUTE not in node.meta
        and fixed.isdisjoint([node, *seen_in(node)])
    ]


def _share(graph: fx.Graph, fixed: set[fx.Node]) -> int:
    """Cast a tensor into a type once. What the backward casts is not kept for it by the forward."""
    first: dict[Any, fx.Node] = {}
    count = 0
    for node in _casts(graph, fixed):
        key = (node.args[0], node.meta["val"].dtype, node.meta.get(PARTITIONER_TAG))
        if first.setdefault(key, node) is not node:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
            count += 1
    return count


def _undo(graph: fx.Graph, fixed: set[fx.Node]) -> int:
    """Leave out a cast into a wider type and back."""
    count = 0
    for node in _casts(graph, fixed):
        chain = views_behind(node)
        wide = (chain[-1] if chain else node).args[0]
        if not (isinstance(wide, fx.Node) and wide.target is CAST and fixed.isdisjoint(seen_in(wide))):
            continue
        source: Any = wide.args[0]
        narrow, between = source.meta["val"], wide.meta["val"]
        is_undone = (narrow.dtype, between.dtype) in EXACT and node.meta["val"].dtype == narrow.dtype
        if is_undone and strides_of(narrow) == strides_of(between):
            node.replace_all_uses_with(same_views(graph, source, chain))
            for unused in [node, *chain, wide]:
                if not unused.users:
                    graph.erase_node(unused)
            count += 1
    return count


def strides_of(tensor: torch.Tensor) -> list[Any]:
    """How a tensor lies in memory, as expressions where sizes can change."""
    return list(map(expression, tensor.stride()))


def views_behind(node: fx.Node, itself: bool = False) -> list[fx.Node]:
    """The views between a node and what is looked at, the last one first; with `itself`, it may be one of them."""
    chain: list[fx.Node] = []
    place: Any = node if itself else node.args[0]
    while is_view(place) and not isinstance(place.meta["val"], tuple | list):
        chain.append(place)
        place = place.args[0]
    return chain


def same_views(graph: fx.Graph, source: fx.Node, chain: list[fx.Node]) -> fx.Node:
    """The same views of another tensor."""
    for view in reversed(chain):
        with graph.inserting_after(view):
            copy = graph.node_copy(view, lambda item, old=view.args[0], new=source: new if item is old else item)  # type: ignore[misc]
        copy.meta = {**view.meta, "val": view.meta["val"].to(source.meta["val"].dtype)}
        source = copy
    return source


def fixed_in(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that are written into, so that it matters when they are read, and those that are given back."""
    outside = [node for node in graph.nodes if node.op == "output" or (node.op == "call_function" and _changes(node))]
    return {item for node in outside for item in seen_in(node)}


def _changes(node: fx.Node) -> bool:
    return not is_part(node) and isinstance(node.target, torch._ops.OpOverload) and writes(node)


def seen_in(node: fx.Node) -> list[fx.Node]:
    """What a node reads, and what that is a view of."""
    found: dict[fx.Node, None] = {}
    pending = list(node.all_input_nodes)
    while pending:
        item = pending.pop()
        if item not in found:
            found[item] = None
            if is_part(item) or is_view(item):
                pending.extend(item.all_input_nodes)
    return list(found)
