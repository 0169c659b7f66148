"""Applying a dropout mask, in either direction."""

from __future__ import annotations

from typing import Any

import torch

from ort_accel.lowering.onnx_graph import OnnxGraph, Operand
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.native_dropout_backward.default)
def apply_mask(graph: OnnxGraph, operand: Operand, mask: Operand, scale: float) -> Any:
    factor = graph.op("Mul", graph.cast(mask, operand.dtype), graph.scalar(scale, operand.dtype))
    return graph.op("Mul", factor, operand)
