"""Names clusters of nodes in recompute plans by their ONNX operators, and says which nodes a plan may recompute."""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.graph.nodes import is_getitem, is_view
from ort_accel.operators.facts import Repeat, facts
from ort_accel.recompute.joint_graph import is_recomputable, packet, tensor_inputs

aten = torch.ops.aten


def may_recompute(node: fx.Node, advanced: bool) -> bool:
    """True if a search for plans may recompute a node; an advanced search goes through norms and products, too."""
    if not is_recomputable(node):
        return False
    if (repeat := facts(node).repeat) is not None:
        return advanced or repeat is Repeat.BASIC
    return is_view(node) or torch.Tag.pointwise in node.target.tags or advanced  # type: ignore[union-attr]


def onnx_name(node: fx.Node, cluster: set[fx.Node]) -> str:
    """Returns the name of a node in a cluster; empty if ONNX needs no operator for it."""
    kind = packet(node)
    if is_getitem(node) or facts(node).onnx_name == "" or _belongs_to_product(node):
        return ""
    if kind is aten.gelu:
        tanh = node.kwargs.get("approximate") == "tanh"
        return "FastGelu" if tanh else "BiasGelu" if _has_bias(node) else "Gelu"
    if kind in (aten._softmax, aten._safe_softmax) and packet(node.all_input_nodes[0]) is aten.add:
        return "BiasSoftmax"
    if kind is aten.addmm and any(packet(user) is aten.gelu for user in _readers(node) if user in cluster):
        return "MatMul"
    if kind is aten.add and any(onnx_name(user, set()) == "BiasSoftmax" for user in node.users if user in cluster):
        return ""
    return facts(node).onnx_name or "".join(
        part.capitalize() for part in str(kind).rpartition(".")[2].strip("_").split("_")
    )


def cluster_name(nodes: list[fx.Node]) -> str:
    """Returns the id of a cluster of nodes in topological order: `Reshape+Where+BiasSoftmax+`."""
    cluster = set(nodes)
    return "".join(f"{name}+" for name in (onnx_name(node, cluster) for node in nodes) if name)


def _belongs_to_product(node: fx.Node) -> bool:
    """True for a view around a matrix product: it flattens tokens to rows, undoes that, or transposes a weight."""
    if not is_view(node):
        return False
    source = next(tensor_inputs(node), None)
    if source is None or source.op == "placeholder" or facts(source).is_product:
        return True
    return bool(node.users) and all(facts(reader).is_product for reader in _readers(node))


def _readers(node: fx.Node) -> list[fx.Node]:
    """Returns the readers of a value, seen through views."""
    return [reader for user in node.users for reader in (_readers(user) if is_view(user) else [user])]


def _has_bias(node: fx.Node) -> bool:
    source = node.all_input_nodes[0]
    while is_view(source):
        source = source.all_input_nodes[0]
    adds_input = packet(source) is aten.add and any(item.op == "placeholder" for item in source.all_input_nodes)
    return packet(source) is aten.addmm or adds_input
