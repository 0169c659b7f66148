"""Questions about the tensors of a graph that several passes ask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeGuard

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from ort_accel.graph.nodes import is_getitem, is_view, writes
from ort_accel.graph.requires_grad import grad_modes
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


def is_named(node: object, name: str) -> TypeGuard[fx.Node]:
    """True for a method, a function of torch or of Python, or an operator with this name, before autograd."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method":
        return node.target == name
    function = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    return node.op == "call_function" and getattr(function, "__name__", "") == name


def example_of(node: fx.Node) -> Any:
    """Returns the value that Dynamo captured a node with, or that a trace of its graph gave."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_single(node: object) -> TypeGuard[fx.Node]:
    """True for a tensor in single precision in a graph that Dynamo captured."""
    value = example_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def has_one_reader(node: object) -> bool:
    """True for a node that one other reads."""
    return isinstance(node, fx.Node) and len(node.users) == 1


def operands_of(node: object, name: str) -> tuple[Argument, Argument] | None:
    """Returns both operands of a function of two, such as a sum; None for other nodes."""
    if not is_named(node, name) or len(node.args) != 2 or node.kwargs:
        return None
    return node.args[0], node.args[1]


def fuse_each(
    graph: fx.Graph,
    find: Callable[[fx.Node], tuple[Argument, ...] | None],
    operator: Callable[..., torch.Tensor],
    steps: Collection[str],
) -> int:
    """Put an operator in place of each node for which `find` returns its operands; returns how many."""
    count = 0
    for node in list(graph.nodes):
        if (operands := find(node)) is None or changes_grad_mode(node, operands):
            continue
        with graph.inserting_before(node):
            fused = graph.call_function(operator, operands)
        replace_steps(node, fused, steps)
        count += 1
    if count:
        recompile(graph)
    return count


def changes_grad_mode(whole: fx.Node, operands: Iterable[Argument]) -> bool:
    """True if steps between operands and a result were made under `no_grad`, and the result was not, or the reverse.

    One operator in their place would have gradients that the steps cut off.
    """
    modes = grad_modes(whole.graph)
    ends = {item for item in operands if isinstance(item, fx.Node)}
    pending, seen = [whole], set[fx.Node]()
    while pending:
        node = pending.pop()
        is_input = node in ends or node.op in {"placeholder", "get_attr"}
        if is_input or node in seen or isinstance(example_of(node), int | torch.SymInt | torch.Size):
            continue
        if modes[node] != modes[whole]:
            return True
        seen.add(node)
        pending += node.all_input_nodes
    return False


def replace_steps(whole: fx.Node, fused: fx.Node, steps: Collection[str]) -> None:
    """Put one operator in place of several, and erase those with these names that served the last of them alone.

    Others without readers, such as those of `vmap`, stay.
    """
    fused.meta = dict(whole.meta)
    whole.replace_all_uses_with(fused)
    erased: set[fx.Node] = set()
    pending = [whole]
    while pending:
        node = pending.pop()
        if node in erased or node.users or not any(is_named(node, name) for name in steps):
            continue
        pending += node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)


def recompile(graph: fx.Graph) -> None:
    """Have the module of a graph run the graph as it is now."""
    if graph.owning_module is not None:
        graph.owning_module.recompile()
