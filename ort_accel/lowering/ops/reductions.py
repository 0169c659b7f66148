"""Sums, means, extremes and their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand, Value, axis
from ort_accel.lowering.ops.comparisons import truth
from ort_accel.lowering.registry import Lowering, lowers
from ort_accel.lowering.term import Result, Term

aten = torch.ops.aten

Dims = Sequence[int] | None


def reduce(graph: OnnxGraph, op_type: str, value: Operand | Result, ndim: int, dims: Dims, keepdim: bool) -> Value:
    """Reduce over some dimensions, or over all where none is named."""
    if ndim == 0:
        return value.value if isinstance(value, Operand | Term) else value
    axes = sorted(axis(dim, ndim) for dim in dims) if dims else list(range(ndim))
    return graph.op(op_type, value, graph.ints(axes), keepdims=int(keepdim))


def not_empty(operand: Operand) -> None:
    """Refuse tensors without elements, for which ONNX Runtime defines no result."""
    if any(isinstance(size, int) and size == 0 for size in operand.shape):
        raise NotLowerable("a reduction of nothing")


@lowers(aten.sum.default, aten.sum.dim_IntList)
def sum_(
    graph: OnnxGraph, operand: Operand, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    return reduce(graph, "ReduceSum", graph.cast(operand, graph.result.dtype), operand.ndim, dims, keepdim)


@lowers(aten.nansum.default)
def nansum(
    graph: OnnxGraph, operand: Operand, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    value = graph.cast(operand, graph.result.dtype)
    if operand.dtype.is_floating_point:
        value = graph.op("Where", graph.op("IsNaN", operand), graph.scalar(0, graph.result.dtype), value)
    return reduce(graph, "ReduceSum", value, operand.ndim, dims, keepdim)


@lowers(aten.mean.default, aten.mean.dim)
def mean(
    graph: OnnxGraph, operand: Operand, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    not_empty(operand)
    return reduce(graph, "ReduceMean", graph.cast(operand, graph.result.dtype), operand.ndim, dims, keepdim)


@lowers(aten.prod.default, aten.prod.dim_int)
def prod(graph: OnnxGraph, operand: Operand, *how: Any, dtype: torch.dtype | None = None) -> Value:
    not_empty(operand)
    dim, keepdim = (*how, False)[:2] if how else (None, False)
    value = graph.cast(operand, graph.result.dtype)
    return reduce(graph, "ReduceProd", value, operand.ndim, None if dim is None else [dim], keepdim)


@lowers(aten.logsumexp.default)
def logsumexp(graph: OnnxGraph, operand: Operand, dims: Sequence[int], keepdim: bool = False) -> Value:
    not_empty(operand)
    dtype = graph.result.dtype
    value = Operand(graph.cast(operand, dtype), operand.fake)
    largest = reduce(graph, "ReduceMax", value, value.ndim, dims, True)
    finite = graph.op("Where", graph.op("IsInf", largest), graph.scalar(0, dtype), largest)
    power = graph.op("Exp", graph.op("Sub", value, finite))
    total = graph.op("Log", reduce(graph, "ReduceSum", power, value.ndim, dims, True))
    result = graph.op("Add", total, finite)
    return result if keepdim else graph.reshape(result, graph.result.shape)


def extreme_of(graph: OnnxGraph, op_type: str, operand: Operand, dims: Dims, keepdim: bool) -> Value:
    """Return the largest or smallest element; NaN where there is one, which ONNX Runtime's kernels ignore."""
    not_empty(operand)
    if operand.dtype == torch.bool:
        return _of_truths(graph, op_type, operand, dims, keepdim)
    value = reduce(graph, op_type, operand, operand.ndim, dims, keepdim)
    if not operand.dtype.is_floating_point:
        return value
    tainted = _of_truths(graph, "ReduceMax", _nan_in(graph, operand), dims, keepdim)
    return graph.op("Where", tainted, graph.scalar(torch.nan, operand.dtype), value)


def _nan_in(graph: OnnxGraph, operand: Operand) -> Operand:
    return Operand(graph.op("IsNaN", operand), operand.fake.new_empty(operand.shape, dtype=torch.bool))


@lowers(aten.amax.default)
def amax(graph: OnnxGraph, operand: Operand, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    return extreme_of(graph, "ReduceMax", operand, dims, keepdim)


@lowers(aten.amin.default)
def amin(graph: OnnxGraph, operand: Operand, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    return extreme_of(graph, "ReduceMin", operand, dims, keepdim)


@lowers(aten.max.default)
def max_(graph: OnnxGraph, operand: Operand) -> Value:
    return extreme_of(graph, "ReduceMax", operand, None, False)


@lowers(aten.min.default)
def min_(graph: OnnxGraph, operand: Operand) -> Value:
    return extreme_of(graph, "ReduceMin", operand, None, False)


@lowers(aten.aminmax.default)
def aminmax(graph: OnnxGraph, operand: Operand, dim: int | None = None, keepdim: bool = False) -> tuple[Value, ...]:
    dims = None if dim is None else [dim]
    return tuple(extreme_of(graph, name, operand, dims, keepdim) for name in ("ReduceMin", "ReduceMax"))


def index_of(graph: OnnxGraph, op_type: str, operand: Operand, dim: int, keepdim: bool) -> Value:
    """Return the index of the first extreme element, or of the first NaN where there is one."""
    not_empty(operand)
    dim = axis(dim, operand.ndim)
    index = graph.op(op_type, operand, axis=dim, keepdims=int(keepdim))
    if not operand.dtype.is_floating_point:
        return index
    nan = _nan_in(graph, operand)
    tainted = _of_truths(graph, "ReduceMax", nan, [dim], keepdim)
    first = graph.op("ArgMax", graph.cast(nan, torch.int32), axis=dim, keepdims=int(keepdim))
    return graph.op("Where", tainted, first, index)


def _argument(graph: OnnxGraph, op_type: str, operand: Operand, dim: int | None, keepdim: bool) -> Value:
    if operand.ndim == 0:
        return graph.scalar(0, torch.int64)
    if dim is not None:
        return index_of(graph, op_type, operand, dim, keepdim)
    flat = Operand(graph.op("Reshape", operand, graph.ints([-1])), operand.fake.new_empty([operand.fake.numel()]))
    return graph.reshape(index_of(graph, op_type, flat, 0, False), graph.result.shape)


@lowers(aten.argmax.default)
def argmax(graph: OnnxGraph, operand: Operand, dim: int | None = None, keepdim: bool = False) -> Value:
    return _argument(graph, "ArgMax", operand, dim, keepdim)


@lowers(aten.argmin.default)
def argmin(graph: OnnxGraph, operand: Operand, dim: int | None = None, keepdim: bool = False) -> Value:
    return _argument(graph, "ArgMin", operand, dim, keepdim)


def _with_index(kind: str) -> Lowering:
    def lowering(graph: OnnxGraph, operand: Operand, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        value = extreme_of(graph, f"Reduce{kind}", operand, [dim], keepdim)
        return value, _argument(graph, f"Arg{kind}", operand, dim, keepdim)

    return lowering


lowers(aten.max.dim)(_with_index("Max"))
lowers(aten.min.dim)(_with_index("Min"))


def _of_truths(graph: OnnxGraph, op_type: str, operand: Operand, dims: Dims, keepdim: bool) -> Value:
    number = graph.cast_from(truth(graph, operand), torch.bool, torch.int32)
    return graph.cast_from(reduce(graph, op_type, number, operand.ndim, dims, keepdim), torch.int32, torch.bool)


def _quantifier(op_type: str) -> Lowering:
    def lowering(graph: OnnxGraph, operand: Operand, dims: int | Dims = None, keepdim: bool = False) -> Value:
        not_empty(operand)
        if graph.result.dtype != torch.bool:
            raise NotLowerable(f"a truth value in {graph.result.dtype}")
        if dims is not None and not isinstance(dims, int) and not dims:
            return truth(graph, operand)  # over no dimension; a sum over none is one over all
        return _of_truths(graph, op_type, operand, [dims] if isinstance(dims, int) else dims, keepdim)

    return lowering


lowers(aten.any.default, aten.any.dim, aten.any.dims)(_quantifier("ReduceMax"))
lowers(aten.all.default, aten.all.dim, aten.all.dims)(_quantifier("ReduceMin"))


@lowers(aten.cumsum.default)
def cumsum(graph: OnnxGraph, operand: Operand, dim: int, dtype: torch.dtype | None = None) -> Value:
    value = graph.cast(operand, graph.result.dtype)
    if operand.ndim == 0:
        return value
    return graph.op("CumSum", value, graph.scalar(axis(dim, operand.ndim), torch.int64))
