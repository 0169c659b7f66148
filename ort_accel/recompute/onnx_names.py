"""The ONNX operators that users of recomputation plans know ATen operators by, and how dear each is to repeat."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_accel.graph.nodes import is_part, is_view
from ort_accel.kernels.packed_rows import own
from ort_accel.recompute.joint_graph import can_be_repeated, inputs_of

aten = torch.ops.aten

NAMES: dict[Any, str] = {
    aten.rsub: "Sub",
    aten.addmm: "MatMul+Add",
    aten.mm: "MatMul",
    aten.bmm: "MatMul",
    aten.baddbmm: "MatMul+Add",
    aten.linear: "MatMul",
    aten._unsafe_view: "Reshape",
    aten.view: "Reshape",
    aten.reshape: "Reshape",
    aten.t: "Transpose",
    aten.permute: "Transpose",
    aten.select: "Gather",
    aten.embedding: "Gather",
    aten.index: "Gather",
    aten.index_select: "Gather",
    own.rows_of: "Gather",
    own.rows_into: "Concat+Gather",
    aten.gather: "GatherElements",
    aten.cat: "Concat",
    aten._to_copy: "Cast",
    aten.arange: "Range",
    aten.full: "ConstantOfShape",
    aten.full_like: "ConstantOfShape",
    aten.new_ones: "ConstantOfShape",
    aten.zeros_like: "ConstantOfShape",
    aten.scalar_tensor: "ConstantOfShape",
    aten.repeat: "Tile",
    aten.tril: "Trilu",
    aten.triu: "Trilu",
    aten.masked_fill: "Where",
    aten.mean: "ReduceMean",
    aten.sum: "ReduceSum",
    aten.amax: "ReduceMax",
    aten.silu: "Swish",
    aten._softmax: "Softmax",
    aten._safe_softmax: "Softmax",
    aten._log_softmax: "LogSoftmax",
    aten.native_layer_norm: "LayerNormalization",
    aten._fused_rms_norm: "SimplifiedLayerNormalization",
    aten.native_group_norm: "GroupNormalization",
    aten.native_batch_norm: "BatchNormalization",
    aten.convolution: "Conv",
    aten.native_dropout_backward: "Dropout",
    aten.ge: "GreaterOrEqual",
    aten.gt: "Greater",
    aten.le: "LessOrEqual",
    aten.lt: "Less",
    aten.eq: "Equal",
    aten.nonzero: "NonZero",
    aten.bitwise_and: "And",
    aten.logical_and: "And",
    aten.cumsum: "CumSum",
}
"""Where the name is not ATen's in capitals. A dropout is written as the product of a value and its mask."""

UNNAMED = {aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy, aten.copy}

PRODUCTS = {aten.addmm, aten.mm, aten.bmm, aten.baddbmm, aten.linear, aten.convolution}

ADVANCED = PRODUCTS | {
    aten._softmax,
    aten._safe_softmax,
    aten._log_softmax,
    aten.native_layer_norm,
    aten._fused_rms_norm,
    aten.native_group_norm,
    aten.native_batch_norm,
    aten.mean,
    aten.sum,
    aten.amax,
    aten.rsqrt,
    aten.var_mean,
}
"""Repeated only in an advanced search; so is fused attention."""

BASIC = {*NAMES, *UNNAMED, aten.constant_pad_nd, aten.roll, aten.flip} - ADVANCED
"""What moves, compares or makes data; with all that ATen calls pointwise, these are what any search repeats."""

GELUS = {aten.gelu}


def packet(node: fx.Node) -> Any:
    """The operator without its overload."""
    return getattr(node.target, "overloadpacket", None)


def may_repeat(node: fx.Node, advanced: bool) -> bool:
    """Whether a search may compute a node again."""
    if not can_be_repeated(node):
        return False
    if packet(node) in ADVANCED or "scaled_dot_product" in str(node.target):
        return advanced
    return packet(node) in BASIC or is_view(node) or torch.Tag.pointwise in node.target.tags or advanced  # type: ignore[union-attr]


def onnx_name(node: fx.Node, inside: set[fx.Node]) -> str:
    """The name of a node in a cluster of these nodes; empty for what ONNX needs no operator for."""
    kind = packet(node)
    if is_part(node) or kind in UNNAMED or _belongs_to_product(node):
        return ""
    if kind in GELUS:
        tanh = node.kwargs.get("approximate") == "tanh"
        return "FastGelu" if tanh else "BiasGelu" if _has_bias(node) else "Gelu"
    if kind in (aten._softmax, aten._safe_softmax) and _adds_mask(node):
        return "BiasSoftmax"
    if kind is aten.addmm and any(packet(user) in GELUS for user in _readers(node) if user in inside):
        return "MatMul"
    if kind is aten.add and any(onnx_name(user, set()) == "BiasSoftmax" for user in node.users if user in inside):
        return ""
    if "scaled_dot_product" in str(node.target):
        return "Attention"
    name = NAMES.get(kind)
    return name or "".join(part.capitalize() for part in str(kind).rpartition(".")[2].strip("_").split("_"))


def cluster_of(nodes: list[fx.Node]) -> str:
    """The id of a cluster of nodes in topological order: `Reshape+Where+BiasSoftmax+`."""
    inside = set(nodes)
    return "".join(f"{name}+" for name in (onnx_name(node, inside) for node in nodes) if name)


def _belongs_to_product(node: fx.Node) -> bool:
    """Whether a view only makes a matrix of rows of tokens, or undoes that, or turns a weight."""
    if not is_view(node):
        return False
    source = next(inputs_of(node), None)
    if source is None or source.op == "placeholder" or packet(source) in PRODUCTS:
        return True
    return bool(node.users) and all(packet(reader) in PRODUCTS for reader in _readers(node))


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
