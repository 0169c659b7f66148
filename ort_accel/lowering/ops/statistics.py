"""Variances, standard deviations and norms of vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ort_accel.lowering.onnx_graph import HALF_DTYPES, NotLowerable, OnnxGraph, Operand, axis
from ort_accel.lowering.ops.elementwise import root_of
from ort_accel.lowering.ops.reductions import Dims, extreme_of, not_empty, reduce
from ort_accel.lowering.registry import lowers
from ort_accel.lowering.single_precision import in_single_precision
from ort_accel.lowering.term import Result, Term, term

aten = torch.ops.aten


def _variance(
    graph: OnnxGraph, operand: Operand, dims: Dims, correction: float | None, keepdim: bool
) -> tuple[Term, Result]:
    """Return variance and mean."""
    not_empty(operand)
    ndim, dtype = operand.ndim, operand.dtype
    if ndim == 0:
        raise NotLowerable("the variance of a single number")
    mean = Term(graph, reduce(graph, "ReduceMean", operand, ndim, dims, True), dtype)
    deviation = term(graph, operand) - mean
    total = Term(graph, reduce(graph, "ReduceSum", deviation * deviation, ndim, dims, keepdim), dtype)
    axes = [axis(dim, ndim) for dim in dims] if dims else range(ndim)
    count = Term(graph, graph.scalar(math.prod(operand.shape[dim] for dim in axes), dtype), dtype)
    degrees_of_freedom = (count - (1 if correction is None else correction)).op("Max", 0)
    average = mean if keepdim else reduce(graph, "ReduceMean", operand, ndim, dims, False)
    return total / degrees_of_freedom, average


@lowers(aten.var.correction)
@in_single_precision
def var(
    graph: OnnxGraph, operand: Operand, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Result:
    return _variance(graph, operand, dims, correction, keepdim)[0]


@lowers(aten.std.correction)
@in_single_precision
def std(
    graph: OnnxGraph, operand: Operand, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Result:
    return root_of(_variance(graph, operand, dims, correction, keepdim)[0])


@lowers(aten.var_mean.correction)
@in_single_precision
def var_mean(
    graph: OnnxGraph, operand: Operand, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Result, Result]:
    return _variance(graph, operand, dims, correction, keepdim)


@lowers(aten.std_mean.correction)
@in_single_precision
def std_mean(
    graph: OnnxGraph, operand: Operand, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Result, Result]:
    variance, average = _variance(graph, operand, dims, correction, keepdim)
    return root_of(variance), average


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    graph: OnnxGraph,
    operand: Operand,
    order: float = 2,
    dims: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Result:
    not_empty(operand)
    wide = torch.float32 if graph.result.dtype in HALF_DTYPES else graph.result.dtype
    length = Operand(graph.op("Abs", graph.cast(operand, wide)), operand.fake.to(wide))
    if order in {math.inf, -math.inf}:
        found: Result = extreme_of(graph, "ReduceMax" if order > 0 else "ReduceMin", length, dims, keepdim)
    else:
        found = _power_norm(graph, length, order, dims, keepdim)
    value = found.value if isinstance(found, Term) else found
    return graph.cast_from(value, wide, graph.result.dtype)


def _power_norm(graph: OnnxGraph, length: Operand, order: float, dims: Dims, keepdim: bool) -> Result:
    dtype = length.dtype
    if order == 0:
        there = graph.op("Not", graph.op("Equal", length, graph.scalar(0, dtype)))
        return reduce(graph, "ReduceSum", graph.cast_from(there, torch.bool, dtype), length.ndim, dims, keepdim)
    if order == 1:
        return reduce(graph, "ReduceSum", length, length.ndim, dims, keepdim)
    if order == 2:
        squares = reduce(graph, "ReduceSum", graph.op("Mul", length, length), length.ndim, dims, keepdim)
        return root_of(Term(graph, squares, dtype))
    power = graph.op("Pow", length, graph.scalar(order, dtype))
    total = reduce(graph, "ReduceSum", power, length.ndim, dims, keepdim)
    return graph.op("Pow", total, graph.scalar(1 / order, dtype))


@lowers(aten.norm.ScalarOpt_dim, aten.norm.Scalar)
def norm(
    graph: OnnxGraph, operand: Operand, order: float | None, dims: Sequence[int] = (), keepdim: bool = False
) -> Result:
    return vector_norm(graph, operand, 2 if order is None else order, dims or None, keepdim)
