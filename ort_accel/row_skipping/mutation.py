"""Tensors that a graph changes: which these are, and how a graph does without changing them where nothing notices."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.graph.nodes import is_part, is_random, is_view

aten = torch.ops.aten

MAY_GIVE_BACK = {aten.type_as.default, aten.einsum.default}
"""Operators that may return a tensor that they were given, although they do not say so."""

WRITES_PLACES = {aten.index_put.default, aten.scatter.src, aten.scatter.value}
"""Operators that do not compute element by element and yet may work on some rows."""

DROPOUTS = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}
"""Which do so as well where they drop nothing."""


def written(graph: fx.Graph) -> set[fx.Node]:
    """All tensors that share memory with one that is changed in place."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        owner[node] = _owner(node, owner)
    changed = {owner[node] for node in graph.nodes if is_in_place(node)}
    return {node for node in graph.nodes if owner[node] in changed}


def _owner(node: fx.Node, owner: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node that made the memory that a node's value lies in."""
    if is_part(node) and _gives_new_parts(node.args[0]):
        return node
    looks = node.op == "call_function" and (is_view(node) or is_part(node) or is_in_place(node) or _gives_back(node))
    return owner[node.all_input_nodes[0]] if looks and node.all_input_nodes else node


def _gives_new_parts(whole: Any) -> bool:
    """Whether a node makes several tensors, each in memory of its own: `topk`, but not `split`. Of lists of tensors
    some operators do not say what these share (`meshgrid`)."""
    schema = getattr(whole.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return all(made.alias_info is None and isinstance(made.type, torch.TensorType) for made in schema.returns)


def is_in_place(node: fx.Node) -> bool:
    """Whether a node changes a tensor that it was given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _gives_back(node: fx.Node) -> bool:
    if node.target in DROPOUTS:
        _, probability, training = node.args
        return not (training and probability)
    return node.target in MAY_GIVE_BACK


def write_less(graph: fx.Graph) -> None:
    """Make new tensors where one is changed that no other tensor shares its memory with, as in `x += y`.

    What reads the changed tensor from then on reads the new one. An operator that changes a tensor needs all of it, and
    one that makes a new one may work on some rows. Without gradients the two are not the same: a tensor that is changed
    so keeps the gradient that it had.
    """
    enabled = torch.is_grad_enabled()
    place = {node: number for number, node in enumerate(graph.nodes)}
    owner: dict[fx.Node, fx.Node] = {}
    shares: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        target = _making_new(node) if enabled and is_in_place(node) else None
        if target is not None and _is_alone(node, owner, shares, place):
            changed: Any = node.args[0]
            node.target = target
            later = [user for user in changed.users if place[user] > place[node]]
            for user in later:
                user.replace_input_with(changed, node)
        owner[node] = _owner(node, owner)
        shares[owner[node]].append(node)


def _is_alone(
    node: fx.Node, owner: dict[fx.Node, fx.Node], shares: dict[fx.Node, list[fx.Node]], place: dict[fx.Node, int]
) -> bool:
    """Whether what a node changes was made by the graph, and is looked at later under its own name only."""
    changed: Any = node.args[0]
    if changed.op != "call_function" or owner[changed] is not changed:
        return False
    others = (other for other in shares[changed] if other is not changed)
    return not any(place[user] > place[node] for other in others for user in other.users)


def _making_new(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operator that gives a new tensor with what this one writes; None where there is none or it is another."""
    target: Any = node.target
    packet = getattr(aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    found = getattr(packet, target._overloadname, None)
    if found is None or found._schema.is_mutable or is_random(node):
        return None
    if torch.Tag.pointwise not in found.tags and found not in WRITES_PLACES:
        return None
    args, kwargs = (fx.map_arg(item, lambda given: given.meta.get("val")) for item in (node.args, node.kwargs))
    changed = args[0]
    if not isinstance(changed, Tensor):
        return None
    with changed.fake_mode:  # type: ignore[attr-defined]
        made = found(*args, **kwargs)
    same = made.dtype == changed.dtype and made.shape == changed.shape
    return found if same else None
