"""Matrix products."""

from __future__ import annotations

import torch

from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand, Value
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.mm.default, aten.bmm.default)
def product(graph: OnnxGraph, one: Operand, other: Operand) -> Value:
    refuse_empty_sum(one)
    return graph.op("MatMul", one, other)


def refuse_empty_sum(one: Operand) -> None:
    """Refuse a product over no element: some runtimes fuse it into a kernel that fails."""
    if isinstance(one.shape[-1], int) and one.shape[-1] == 0:
        raise NotLowerable("a product over a dimension of size 0")


@lowers(aten.addmm.default)
def addmm(graph: OnnxGraph, bias: Operand, one: Operand, other: Operand, beta: float = 1, alpha: float = 1) -> Value:
    if beta == 0 or (one.dtype == torch.float64 and (beta, alpha) != (1, 1)):  # Gemm keeps both in single precision
        return baddbmm(graph, bias, one, other, beta, alpha)
    refuse_empty_sum(one)
    return graph.op("Gemm", one, other, bias, alpha=float(alpha), beta=float(beta))


@lowers(aten.baddbmm.default)
def baddbmm(graph: OnnxGraph, bias: Operand, one: Operand, other: Operand, beta: float = 1, alpha: float = 1) -> Value:
    refuse_empty_sum(one)
    result = graph.op("MatMul", one, other)
    if alpha != 1:
        result = graph.op("Mul", result, graph.scalar(alpha, graph.result.dtype))
    if beta == 0:
        return result
    scaled = bias.value if beta == 1 else graph.op("Mul", bias, graph.scalar(beta, bias.dtype))
    return graph.op("Add", result, scaled)
