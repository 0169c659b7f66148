"""Finds the tensors that a graph mutates, and replaces in-place operators by functional ones where that is safe."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ort_accel.graph.nodes import is_getitem, is_random, is_view
from ort_accel.graph.requires_grad import grad_modes
from ort_accel.row_skipping.row_flow import tensor_input

aten = torch.ops.aten

MAY_RETURN_INPUT = {aten.type_as.default, aten.einsum.default}
"""Operators that may return their input, although their schema declares no alias."""

SCATTERS = {aten.index_put.default, aten.scatter.src, aten.scatter.value}
"""Functional operators that are not element-wise and are made functional all the same."""

DROPOUTS = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}
"""Operators that return their input where they drop nothing."""


def mutated_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns all tensors that share memory with one that is mutated."""
    return {node for group in mutated_groups(graph) for node in group}


def mutated_groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Returns the nodes that share memory and of which one is mutated, each group in the order of the graph.

    The first of a group allocated the memory, and those that mutate it are among the others.
    """
    owner: dict[fx.Node, fx.Node] = {}
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        owner[node] = _owner(node, owner)
        groups[owner[node]].append(node)
    return [group for group in groups.values() if any(map(is_in_place, group))]


def _owner(node: fx.Node, owner: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns the node that allocated the memory of a node's value."""
    if is_getitem(node) and _allocates_outputs(tensor_input(node)):
        return node
    is_alias = is_view(node) or is_getitem(node) or is_in_place(node) or _returns_input(node)
    return owner[node.all_input_nodes[0]] if node.op == "call_function" and is_alias and node.all_input_nodes else node


def _allocates_outputs(node: fx.Node) -> bool:
    """True if a node returns several tensors, each in memory of its own: `topk`, but not `split`.

    Operators that return a list of tensors are left out: some declare no alias although there is one (`meshgrid`).
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    returns = node.target._schema.returns
    return all(item.alias_info is None and isinstance(item.type, torch.TensorType) for item in returns)


def is_in_place(node: fx.Node) -> bool:
    """True if a node's operator mutates an input."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _returns_input(node: fx.Node) -> bool:
    if node.target in DROPOUTS:
        _, probability, training = node.args
        return not (training and probability)
    return node.target in MAY_RETURN_INPUT


def functionalize(graph: fx.Graph) -> None:
    """Replaces in-place operators on tensors that no other tensor shares memory with, as in `x += y`.

    Later readers of the mutated tensor read the new one. An in-place operator needs all rows; a functional one may
    compute some. Operators under `no_grad` are kept: there a mutated tensor keeps the gradient that it had.
    """
    modes = grad_modes(graph)
    position = {node: number for number, node in enumerate(graph.nodes)}
    owner: dict[fx.Node, fx.Node] = {}
    aliases: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        target = _functional_form(node) if modes[node] and is_in_place(node) else None
        if target is not None and _is_unaliased(node, owner, aliases, position):
            mutated = tensor_input(node)
            node.target = target
            for user in [user for user in mutated.users if position[user] > position[node]]:
                user.replace_input_with(mutated, node)
        owner[node] = _owner(node, owner)
        aliases[owner[node]].append(node)


def _is_unaliased(
    node: fx.Node, owner: dict[fx.Node, fx.Node], aliases: dict[fx.Node, list[fx.Node]], position: dict[fx.Node, int]
) -> bool:
    """True if the graph allocated the tensor that a node mutates, and no alias of it is read later."""
    mutated = tensor_input(node)
    if mutated.op != "call_function" or owner[mutated] is not mutated:
        return False
    others = (other for other in aliases[mutated] if other is not mutated)
    return not any(position[user] > position[node] for other in others for user in other.users)


def _functional_form(node: fx.Node) -> torch._ops.OpOverload | None:
    """Returns the functional operator of the same result; None where there is none."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema
    packet = getattr(aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
    found = getattr(packet, node.target._overloadname, None)
    if not isinstance(found, torch._ops.OpOverload) or found._schema.is_mutable or is_random(node):
        return None
    if torch.Tag.pointwise not in found.tags and found not in SCATTERS:
        return None
    args = fx.map_arg(node.args, lambda item: item.meta.get("val"))
    kwargs = fx.map_arg(node.kwargs, lambda item: item.meta.get("val"))
    mutated = args[0]
    if not isinstance(mutated, FakeTensor):
        return None
    with mutated.fake_mode:
        result = found(*args, **kwargs)
    return found if result.dtype == mutated.dtype and result.shape == mutated.shape else None
