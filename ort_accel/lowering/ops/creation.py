"""New tensors, whose numbers are known beforehand."""

from __future__ import annotations

from typing import Any

import torch

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


def constant_of(graph: OnnxGraph, number: Any) -> Any:
    """A tensor of the result's shape and type that holds one number."""
    scalar = graph.scalar(number, graph.result.dtype)
    return graph.op("Expand", scalar, graph.sizes(graph.result.shape)) if graph.result.ndim else scalar


@lowers(aten.full.default, aten.full_like.default, aten.fill.Scalar)
def full(graph: OnnxGraph, like: Any, number: Any, **options: Any) -> Any:
    return constant_of(graph, number)


@lowers(aten.new_full.default)
def new_full(graph: OnnxGraph, operand: Operand, shape: Any, number: Any, **options: Any) -> Any:
    return constant_of(graph, number)


@lowers(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default)
def zeros(graph: OnnxGraph, *what: Any, **options: Any) -> Any:
    return constant_of(graph, 0)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(graph: OnnxGraph, *what: Any, **options: Any) -> Any:
    return constant_of(graph, 1)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(graph: OnnxGraph, number: Any, **options: Any) -> Any:
    return graph.scalar(number, graph.result.dtype)


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(graph: OnnxGraph, *bounds: Any, **options: Any) -> Any:
    if not all(isinstance(bound, int | torch.SymInt) for bound in bounds):
        raise NotLowerable("a range with bounds that are not integers")
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    numbers = graph.op("Range", *(graph.scalar(bound, torch.int64) for bound in (start, end, step)))
    return graph.cast_from(numbers, torch.int64, graph.result.dtype)


def diagonal_mask(graph: OnnxGraph, rows: Size, columns: Size, offset: int) -> Any:
    """Where column - row is the offset."""
    starts = _count(graph, offset, offset + rows)
    return graph.op("Equal", graph.op("Unsqueeze", starts, graph.ints([1])), _count(graph, 0, columns))


def _count(graph: OnnxGraph, start: Size, end: Size) -> Any:
    return graph.op("Range", *(graph.scalar(bound, torch.int64) for bound in (start, end, 1)))


@lowers(aten.eye.default, aten.eye.m)
def eye(graph: OnnxGraph, rows: Size, columns: Size | None = None, **options: Any) -> Any:
    mask = diagonal_mask(graph, rows, rows if columns is None else columns, 0)
    return graph.cast_from(mask, torch.bool, graph.result.dtype)
