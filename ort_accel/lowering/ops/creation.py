"""New tensors of constant numbers."""

from __future__ import annotations

import torch

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.lowering.onnx_graph import NotLowerable, Number, OnnxGraph, Operand, Value
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


def constant_of(graph: OnnxGraph, number: Number) -> Value:
    """Return a tensor of the result's shape and type, filled with one number."""
    scalar = graph.scalar(number, graph.result.dtype)
    return graph.op("Expand", scalar, graph.sizes(graph.result.shape)) if graph.result.ndim else scalar


@lowers(aten.full.default, aten.full_like.default, aten.fill.Scalar)
def full(graph: OnnxGraph, like: object, number: Number, **options: object) -> Value:
    return constant_of(graph, number)


@lowers(aten.new_full.default)
def new_full(graph: OnnxGraph, operand: Operand, shape: object, number: Number, **options: object) -> Value:
    return constant_of(graph, number)


@lowers(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default)
def zeros(graph: OnnxGraph, *args: object, **options: object) -> Value:
    return constant_of(graph, 0)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(graph: OnnxGraph, *args: object, **options: object) -> Value:
    return constant_of(graph, 1)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(graph: OnnxGraph, number: Number, **options: object) -> Value:
    return graph.scalar(number, graph.result.dtype)


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(graph: OnnxGraph, *bounds: Size, **options: object) -> Value:
    if not all(isinstance(bound, int | torch.SymInt) for bound in bounds):
        raise NotLowerable("a range with bounds that are not integers")
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    numbers = graph.op("Range", *(graph.scalar(bound, torch.int64) for bound in (start, end, step)))
    return graph.cast_from(numbers, torch.int64, graph.result.dtype)


def diagonal_mask(graph: OnnxGraph, rows: Size, columns: Size, offset: int) -> Value:
    """True where column - row is the offset."""
    starts = _count(graph, offset, offset + rows)
    return graph.op("Equal", graph.op("Unsqueeze", starts, graph.ints([1])), _count(graph, 0, columns))


def _count(graph: OnnxGraph, start: Size, end: Size) -> Value:
    return graph.op("Range", *(graph.scalar(bound, torch.int64) for bound in (start, end, 1)))


@lowers(aten.eye.default, aten.eye.m)
def eye(graph: OnnxGraph, rows: Size, columns: Size | None = None, **options: object) -> Value:
    mask = diagonal_mask(graph, rows, rows if columns is None else columns, 0)
    return graph.cast_from(mask, torch.bool, graph.result.dtype)
