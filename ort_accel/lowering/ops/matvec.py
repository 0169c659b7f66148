"""Products with vectors, as products of matrices with one row or column.

ONNX Runtime fuses a transposed matrix with a product, and computes it wrongly where the other operand is a vector.
"""

from __future__ import annotations

from typing import Any

import torch

from ort_accel.lowering.onnx_graph import OnnxGraph, Operand
from ort_accel.lowering.ops.matmul import not_over_nothing
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.mv.default)
def mv(graph: OnnxGraph, matrix: Operand, vector: Operand) -> Any:
    not_over_nothing(matrix)
    column = graph.op("Unsqueeze", vector, graph.ints([1]))
    return graph.op("Squeeze", graph.op("MatMul", matrix, column), graph.ints([1]))


@lowers(aten.addmv.default)
def addmv(
    graph: OnnxGraph, operand: Operand, matrix: Operand, vector: Operand, beta: float = 1, alpha: float = 1
) -> Any:
    dtype = graph.result.dtype
    product = mv(graph, matrix, vector)
    if alpha != 1:
        product = graph.op("Mul", product, graph.scalar(alpha, dtype))
    if beta == 0:  # NaN in what is not added does not count
        return product
    rest = operand if beta == 1 else graph.op("Mul", operand, graph.scalar(beta, dtype))
    return graph.op("Add", rest, product)


@lowers(aten.dot.default, aten.vdot.default)
def dot(graph: OnnxGraph, one: Operand, other: Operand) -> Any:
    not_over_nothing(one)
    row = graph.op("Unsqueeze", one, graph.ints([0]))
    column = graph.op("Unsqueeze", other, graph.ints([1]))
    return graph.op("Squeeze", graph.op("MatMul", row, column), graph.ints([0, 1]))
