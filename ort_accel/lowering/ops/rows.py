"""Packed rows: a Gather takes them, and another one puts them back."""

from __future__ import annotations

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.kernels.packed_rows import own
from ort_accel.lowering.onnx_graph import OnnxGraph, Operand, Value
from ort_accel.lowering.registry import lowers


@lowers(own.rows_of.default)
def rows_of(graph: OnnxGraph, source: Operand, rows: Operand, places: Operand) -> Value:
    return graph.op("Gather", source, rows, axis=0)


@lowers(own.rows_into.default)
def rows_into(graph: OnnxGraph, source: Operand, rows: Operand, places: Operand, count: Size) -> Value:
    """Append a row of zeros, which the index -1 reads."""
    blank = graph.op("Expand", graph.scalar(0, source.dtype), graph.sizes([1, *source.shape[1:]]))
    return graph.op("Gather", graph.op("Concat", source, blank, axis=0), places, axis=0)
