"""Lowerings that compute 16-bit numbers in single precision, as PyTorch's kernels do: squares overflow in fp16."""

from __future__ import annotations

from functools import wraps
from typing import Any, cast

import torch

from ort_accel.lowering.onnx_graph import HALF_DTYPES, OnnxGraph, Operand
from ort_accel.lowering.registry import F


def in_single_precision(lowering: F) -> F:
    """Let a lowering compute 16-bit numbers in single precision, and round only the results."""

    @wraps(lowering)
    def wide(graph: OnnxGraph, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(item, Operand) and item.dtype in HALF_DTYPES for item in args):
            return lowering(graph, *args, **kwargs)
        given = [_in_single(graph, item) if isinstance(item, Operand) else item for item in args]
        results = lowering(graph, *given, **kwargs)
        if not isinstance(results, tuple):
            return graph.cast_from(results, torch.float32, graph.result.dtype)
        promised = zip(results, graph.result, strict=True)
        return tuple(value and graph.cast_from(value, torch.float32, fake.dtype) for value, fake in promised)

    return cast("F", wide)


def _in_single(graph: OnnxGraph, operand: Operand) -> Operand:
    return Operand(graph.cast(operand, torch.float32), operand.fake.to(torch.float32))
