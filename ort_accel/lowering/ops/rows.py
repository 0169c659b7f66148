"""Taking some rows of a tensor and putting them back: a Gather in either direction."""

from __future__ import annotations

from typing import Any

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.kernels.packed_rows import own
from ort_accel.lowering.onnx_graph import OnnxGraph, Operand
from ort_accel.lowering.registry import lowers


@lowers(own.rows_of.default)
def rows_of(graph: OnnxGraph, source: Operand, rows: Operand, places: Operand) -> Any:
    return graph.op("Gather", source, rows, axis=0)


@lowers(own.rows_into.default)
def rows_into(graph: OnnxGraph, source: Operand, rows: Operand, places: Operand, count: Size) -> Any:
    """A row of zeros behind the others is the one that -1 names."""
    blank = graph.op("Expand", graph.scalar(0, source.dtype), graph.sizes([1, *source.shape[1:]]))
    return graph.op("Gather", graph.op("Concat", source, blank, axis=0), places, axis=0)
