"""Comparisons, logic and selection by a condition."""

from __future__ import annotations

import torch

from ort_accel.lowering.onnx_graph import Number, OnnxGraph, Operand, Value
from ort_accel.lowering.ops.elementwise import common_dtype, operand_as
from ort_accel.lowering.registry import Lowering, lowers

aten = torch.ops.aten


def _comparison(op_type: str, negated: bool = False) -> Lowering:
    def lowering(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> Value:
        dtype = common_dtype(one, other)
        result = graph.op(op_type, operand_as(graph, one, dtype), operand_as(graph, other, dtype))
        return graph.op("Not", result) if negated else result

    return lowering


for packet, (name, is_negated) in {
    "eq": ("Equal", False),
    "ne": ("Equal", True),
    "lt": ("Less", False),
    "le": ("LessOrEqual", False),
    "gt": ("Greater", False),
    "ge": ("GreaterOrEqual", False),
}.items():
    for overload in ("Tensor", "Scalar"):
        lowers(getattr(getattr(aten, packet), overload))(_comparison(name, is_negated))


def truth(graph: OnnxGraph, operand: Operand) -> Value:
    """True where a tensor is not zero."""
    if operand.dtype == torch.bool:
        return operand.value
    return graph.op("Not", graph.op("Equal", operand, graph.scalar(0, operand.dtype)))


def _logical(op_type: str) -> Lowering:
    def lowering(graph: OnnxGraph, one: Operand, other: Operand) -> Value:
        return graph.op(op_type, truth(graph, one), truth(graph, other))

    return lowering


def _bitwise(op_type: str) -> Lowering:
    def lowering(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> Value:
        dtype = graph.result.dtype
        kind = op_type if dtype == torch.bool else f"Bitwise{op_type}"
        return graph.op(kind, operand_as(graph, one, dtype), operand_as(graph, other, dtype))

    return lowering


for name in ("and", "or", "xor"):
    lowers(getattr(aten, f"logical_{name}").default)(_logical(name.capitalize()))
    bitwise = getattr(aten, f"bitwise_{name}")
    lowers(bitwise.Tensor, bitwise.Scalar)(_bitwise(name.capitalize()))


@lowers(aten.logical_not.default)
def logical_not(graph: OnnxGraph, operand: Operand) -> Value:
    return graph.op("Not", truth(graph, operand))


@lowers(aten.bitwise_not.default)
def bitwise_not(graph: OnnxGraph, operand: Operand) -> Value:
    return graph.op("Not" if operand.dtype == torch.bool else "BitwiseNot", operand)


@lowers(aten.where.self)
def where(graph: OnnxGraph, condition: Operand, one: Operand | Number, other: Operand | Number) -> Value:
    dtype = graph.result.dtype
    return graph.op("Where", truth(graph, condition), operand_as(graph, one, dtype), operand_as(graph, other, dtype))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(graph: OnnxGraph, operand: Operand, mask: Operand, number: Operand | Number) -> Value:
    return graph.op("Where", mask, operand_as(graph, number, operand.dtype), operand)
