"""The product with a dropout mask, in forward and backward."""

from __future__ import annotations

import torch

from ort_accel.lowering.onnx_graph import OnnxGraph, Operand, Value
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.native_dropout_backward.default)
def apply_mask(graph: OnnxGraph, operand: Operand, mask: Operand, scale: float) -> Value:
    factor = graph.op("Mul", graph.cast(mask, operand.dtype), graph.scalar(scale, operand.dtype))
    return graph.op("Mul", factor, operand)
