"""The ONNX operators that users of recomputation plans know ATen operators by, and how dear each is to repeat."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_accel.graph.nodes import is_part, is_view
from ort_accel.operators.facts import Repeat, facts
from ort_accel.recompute.joint_graph import can_be_repeated, inputs_of

aten = torch.ops.aten


def packet(node: fx.Node) -> Any:
    """The operator without its overload."""
    return getattr(node.target, "overloadpacket", None)


def may_repeat(node: fx.Node, advanced: bool) -> bool:
    """Whether a search may compute a node again."""
    if not can_be_repeated(node):
        return False
    if (repeat := facts(node).repeat) is not None:
        return advanced or repeat is Repeat.BASIC
    return is_view(node) or torch.Tag.pointwise in node.target.tags or advanced  # type: ignore[union-attr]


def onnx_name(node: fx.Node, inside: set[fx.Node]) -> str:
    """The name of a node in a cluster of these nodes; empty for what ONNX needs no operator for."""
    kind = packet(node)
    if is_part(node) or facts(node).onnx_name == "" or _belongs_to_product(node):
        return ""
    if kind is aten.gelu:
        tanh = node.kwargs.get("approximate") == "tanh"
        return "FastGelu" if tanh else "BiasGelu" if _has_bias(node) else "Gelu"
    if kind in (aten._softmax, aten._safe_softmax) and _adds_mask(node):
        return "BiasSoftmax"
    if kind is aten.addmm and any(packet(user) is aten.gelu for user in _readers(node) if user in inside):
        return "MatMul"
    if kind is aten.add and any(onnx_name(user, set()) == "BiasSoftmax" for user in node.users if user in inside):
        return ""
    return facts(node).onnx_name or "".join(
        part.capitalize() for part in str(kind).rpartition(".")[2].strip("_").split("_")
    )


def cluster_of(nodes: list[fx.Node]) -> str:
    """The id of a cluster of nodes in topological order: `Reshape+Where+BiasSoftmax+`."""
    inside = set(nodes)
    return "".join(f"{name}+" for name in (onnx_name(node, inside) for node in nodes) if name)


def _belongs_to_product(node: fx.Node) -> bool:
    """Whether a view only makes a matrix of rows of tokens, or undoes that, or turns a weight."""
    if not is_view(node):
        return False
    source = next(inputs_of(node), None)
    if source is None or source.op == "placeholder" or facts(source).is_product:
        return True
    return bool(node.users) and all(facts(reader).is_product for reader in _readers(node))


def _through_views(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value, seen through views."""
    return [reader for user in node.users for reader in (_readers(user) if is_view(user) else [user])]


def _has_bias(node: fx.Node) -> bool:
    source = _through_views(node.all_input_nodes[0])
    return packet(source) is aten.addmm or (
        packet(source) is aten.add and any(i.op == "placeholder" for i in source.all_input_nodes)
    )


def _adds_mask(node: fx.Node) -> bool:
    return packet(node.all_input_nodes[0]) is aten.add
