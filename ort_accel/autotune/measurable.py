"""Whether a graph may be run with made-up inputs, before the training begins, without anybody noticing."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ort_accel.graph.nodes import fakes_in, is_part, is_size, is_watched, op_name
from ort_accel.kernels.attention_slim import LEAN
from ort_accel.kernels.dropout_mask import kept
from ort_accel.kernels.packed_rows import ROW_OPERATORS
from ort_accel.lowering.registry import lowerings

KNOWN = {"aten", "prims"}
"""Namespaces whose operators do nothing but compute, as those do that ONNX can express; others may send or count."""


def obstacle(graph: fx.Graph) -> str:
    """Why the graph must not be run so; empty if it may."""
    for node in graph.nodes:
        if node.op != "call_function" or is_part(node) or is_size(node):
            continue
        target = node.target
        if is_watched(node) or not (target in lowerings() or target is kept or _only_computes(target)):
            return f"{op_name(node)} may do more than compute"
        if free_unbacked_symbols(fakes_in(node.meta["val"])):
            return f"the sizes that {op_name(node)} gives depend on data"
    return ""


def _only_computes(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace in KNOWN or target.overloadpacket in ROW_OPERATORS | LEAN
