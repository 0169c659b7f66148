"""Products with vectors, written as products of matrices with one row or column.

ONNX Runtime fuses a transposed matrix with a product, and computes it wrongly where the other operand is a vector.
"""

from __future__ import annotations

import torch

from ort_accel.lowering.onnx_graph import OnnxGraph, Operand, Value
from ort_accel.lowering.ops.matmul import refuse_empty_sum
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.mv.default)
def mv(graph: OnnxGraph, matrix: Operand, vector: Operand) -> Value:
    refuse_empty_sum(matrix)
    column = graph.op("Unsqueeze", vector, graph.ints([1]))
    return graph.op("Squeeze", graph.op("MatMul", matrix, column), graph.ints([1]))


@lowers(aten.addmv.default)
def addmv(
    graph: OnnxGraph, operand: Operand, matrix: Operand, vector: Operand, beta: float = 1, alpha: float = 1
) -> Value:
    dtype = graph.result.dtype
    product = mv(graph, matrix, vector)
    if alpha != 1:
        product = graph.op("Mul", product, graph.scalar(alpha, dtype))
    if beta == 0:  # NaN in an operand that is not added does not count
        return product
    rest = operand if beta == 1 else graph.op("Mul", operand, graph.scalar(beta, dtype))
    return graph.op("Add", rest, product)


@lowers(aten.dot.default, aten.vdot.default)
def dot(graph: OnnxGraph, one: Operand, other: Operand) -> Value:
    refuse_empty_sum(one)
    row = graph.op("Unsqueeze", one, graph.ints([0]))
    column = graph.op("Unsqueeze", other, graph.ints([1]))
    return graph.op("Squeeze", graph.op("MatMul", row, column), graph.ints([0, 1]))
