"""Matrix products."""

from __future__ import annotations

import torch

from ort_accel.lowering.onnx_graph import MICROSOFT, NotLowerable, OnnxGraph, Operand, Value
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.mm.default, aten.bmm.default)
def product(graph: OnnxGraph, one: Operand, other: Operand) -> Value:
    refuse_empty_sum(one)
    return _product(graph, one, other)


def _product(graph: OnnxGraph, one: Operand, other: Operand) -> Value:
    """Return a product, with the transposes of its operands in single precision."""
    (left, trans_a), (right, trans_b) = map(_untransposed, (one, other))
    if one.dtype != torch.float32 or not (trans_a or trans_b):
        return graph.op("MatMul", one, other)
    return graph.op("FusedMatMul", left, right, domain=MICROSOFT, transA=trans_a, transB=trans_b)


def _untransposed(operand: Operand) -> tuple[Value, int]:
    """Return what an operand is the transpose of, and 1 if it is one.

    ONNX Runtime fuses transposes itself, but puts the new product behind all operators that were there before.
    """
    maker = operand.value.producer()
    if maker is None or maker.op_type != "Transpose":
        return operand.value, 0
    swapped = list(range(len(operand.shape)))
    swapped[-2:] = swapped[:-3:-1]
    perm, source = maker.attributes.get("perm"), maker.inputs[0]
    is_turned = perm is not None and list(perm.as_ints()) == swapped
    return (source, 1) if source is not None and is_turned else (operand.value, 0)


def refuse_empty_sum(one: Operand) -> None:
    """Refuse a product over no element: some runtimes fuse it into a kernel that fails."""
    if isinstance(one.shape[-1], int) and one.shape[-1] == 0:
        raise NotLowerable("a product over a dimension of size 0")


@lowers(aten.addmm.default)
def addmm(graph: OnnxGraph, bias: Operand, one: Operand, other: Operand, beta: float = 1, alpha: float = 1) -> Value:
    if beta == 0 or (one.dtype == torch.float64 and (beta, alpha) != (1, 1)):  # Gemm keeps both in single precision
        return baddbmm(graph, bias, one, other, beta, alpha)
    refuse_empty_sum(one)
    (left, trans_a), (right, trans_b) = map(_untransposed, (one, other))
    return graph.op("Gemm", left, right, bias, alpha=float(alpha), beta=float(beta), transA=trans_a, transB=trans_b)


@lowers(aten.baddbmm.default)
def baddbmm(graph: OnnxGraph, bias: Operand, one: Operand, other: Operand, beta: float = 1, alpha: float = 1) -> Value:
    refuse_empty_sum(one)
    result = _product(graph, one, other)
    if alpha != 1:
        result = graph.op("Mul", result, graph.scalar(alpha, graph.result.dtype))
    if beta == 0:
        return result
    scaled = bias.value if beta == 1 else graph.op("Mul", bias, graph.scalar(beta, bias.dtype))
    return graph.op("Add", result, scaled)
