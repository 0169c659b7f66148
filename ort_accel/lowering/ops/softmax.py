"""Softmax, log-softmax and their gradients."""

from __future__ import annotations

import math

import torch

from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand, Value, axis
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten._softmax.default)
def softmax(graph: OnnxGraph, operand: Operand, dim: int, half_to_float: bool) -> Value:
    return graph.op("Softmax", graph.cast(operand, graph.result.dtype), axis=axis(dim, operand.ndim))


@lowers(aten._safe_softmax.default)
def safe_softmax(graph: OnnxGraph, operand: Operand, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Return zeros, not NaN, where all of a row is -inf."""
    dim = axis(dim, operand.ndim)
    value, lowest = graph.cast(operand, graph.result.dtype), graph.scalar(-math.inf, graph.result.dtype)
    largest = graph.op("ReduceMax", value, graph.ints([dim]), keepdims=1)
    total = graph.op("ReduceSum", value, graph.ints([dim]), keepdims=1)  # NaN where one of them is, unlike the largest
    masked = graph.op("And", graph.op("Equal", largest, lowest), graph.op("Equal", total, lowest))
    return graph.op("Where", masked, graph.scalar(0, graph.result.dtype), graph.op("Softmax", value, axis=dim))


@lowers(aten._log_softmax.default)
def log_softmax(graph: OnnxGraph, operand: Operand, dim: int, half_to_float: bool) -> Value:
    value, dim = graph.cast(operand, graph.result.dtype), axis(dim, operand.ndim)
    if graph.result.dtype != torch.float64 or not operand.ndim:
        return graph.op("LogSoftmax", value, axis=dim)
    largest = graph.op("ReduceMax", value, graph.ints([dim]), keepdims=1)  # the kernel for float64 loses NaN
    shifted = graph.op("Sub", value, largest)
    total = graph.op("ReduceSum", graph.op("Exp", shifted), graph.ints([dim]), keepdims=1)
    return graph.op("Sub", shifted, graph.op("Log", total))


@lowers(aten._softmax_backward_data.default)
def softmax_backward(graph: OnnxGraph, grad: Operand, output: Operand, dim: int, dtype: torch.dtype) -> Value:
    if graph.result.dtype != output.dtype:
        raise NotLowerable("the gradient of a softmax that widened its input")
    weighted = graph.op("Mul", grad, output)
    return graph.op("Sub", weighted, graph.op("Mul", output, _total(graph, weighted, output, dim)))


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(graph: OnnxGraph, grad: Operand, output: Operand, dim: int, dtype: torch.dtype) -> Value:
    if graph.result.dtype != output.dtype:
        raise NotLowerable("the gradient of a softmax that widened its input")
    return graph.op("Sub", grad, graph.op("Mul", graph.op("Exp", output), _total(graph, grad.value, output, dim)))


def _total(graph: OnnxGraph, value: Value, like: Operand, dim: int) -> Value:
    if not like.ndim:
        return value
    return graph.op("ReduceSum", value, graph.ints([axis(dim, like.ndim)]), keepdims=1)
