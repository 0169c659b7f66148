"""Questions about the tensors of a graph that several passes ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from ort_accel.graph.nodes import is_getitem, is_view, writes
from ort_accel.graph.symbolic_sizes import expression

CAST = torch.ops.aten._to_copy.default


def is_cast(argument: Argument) -> TypeGuard[fx.Node]:
    """True if an argument is a node that casts."""
    return isinstance(argument, fx.Node) and argument.target is CAST


def source_of(node: fx.Node) -> fx.Node:
    """Returns the first argument of a node, the tensor that a cast or a view is taken of."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def strides_of(tensor: torch.Tensor) -> list[int | sympy.Expr]:
    """Returns the strides of a tensor, as expressions where sizes can change."""
    return list(map(expression, tensor.stride()))


def views_behind(node: fx.Node, *, with_itself: bool = False) -> list[fx.Node]:
    """Returns the views between a node and the viewed tensor, the last one first.

    With `with_itself` the node may be the last of these views.
    """
    chain: list[fx.Node] = []
    item = node if with_itself else source_of(node)
    while is_view(item) and not isinstance(item.meta["val"], tuple | list):
        chain.append(item)
        item = source_of(item)
    return chain


def copy_views(graph: fx.Graph, source: fx.Node, chain: Sequence[fx.Node]) -> fx.Node:
    """Take the same views of another tensor; returns the last view. `chain` has the last view first."""
    for view in reversed(chain):
        with graph.inserting_after(view):
            copy = graph.node_copy(view, lambda item, old=view.args[0], new=source: new if item is old else item)  # type: ignore[misc]
        copy.meta = {**view.meta, "val": view.meta["val"].to(source.meta["val"].dtype)}
        source = copy
    return source


def pinned_tensors(graph: fx.Graph) -> set[fx.Node]:
    """Returns the tensors that the graph returns, and those that it writes into, so that the time of a read matters."""
    readers = [node for node in graph.nodes if node.op == "output" or (node.op == "call_function" and _mutates(node))]
    return {item for node in readers for item in tensors_behind(node)}


def _mutates(node: fx.Node) -> bool:
    return not is_getitem(node) and isinstance(node.target, OpOverload) and writes(node)


def tensors_behind(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs of a node, and the tensors that these inputs are views of."""
    found: dict[fx.Node, None] = {}
    pending = list(node.all_input_nodes)
    while pending:
        item = pending.pop()
        if item not in found:
            found[item] = None
            if is_getitem(item) or is_view(item):
                pending.extend(item.all_input_nodes)
    return list(found)
