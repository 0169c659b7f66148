"""Activation functions made of straight pieces, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from ort_accel.lowering.onnx_graph import OnnxGraph, Operand
from ort_accel.lowering.ops.arithmetic import clamp
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


def _above(graph: OnnxGraph, value: Operand, bound: float) -> Any:
    return graph.op("Greater", value, graph.scalar(bound, value.dtype))


def _below(graph: OnnxGraph, value: Operand, bound: float) -> Any:
    return graph.op("Less", value, graph.scalar(bound, value.dtype))


@lowers(aten.threshold.default)
def threshold(graph: OnnxGraph, value: Operand, bound: float, number: float) -> Any:
    low = graph.op("LessOrEqual", value, graph.scalar(bound, value.dtype))
    return graph.op("Where", low, graph.scalar(number, value.dtype), value)


@lowers(aten.threshold_backward.default)
def threshold_backward(graph: OnnxGraph, grad: Operand, value: Operand, bound: float) -> Any:
    """The gradient passes where the value is NaN."""
    low = graph.op("LessOrEqual", value, graph.scalar(bound, value.dtype))
    return graph.op("Where", low, graph.scalar(0, grad.dtype), grad)


@lowers(aten.leaky_relu.default)
def leaky_relu(graph: OnnxGraph, value: Operand, slope: float = 0.01) -> Any:
    flat = graph.op("Mul", value, graph.scalar(slope, value.dtype))
    return graph.op("Where", _above(graph, value, 0), value, flat)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(graph: OnnxGraph, grad: Operand, value: Operand, slope: float, is_result: bool) -> Any:
    flat = graph.op("Mul", grad, graph.scalar(slope, grad.dtype))
    return graph.op("Where", _above(graph, value, 0), grad, flat)


@lowers(aten._prelu_kernel.default)
def prelu(graph: OnnxGraph, value: Operand, weight: Operand) -> Any:
    return graph.op("Where", _above(graph, value, 0), value, graph.op("Mul", weight, value))


@lowers(aten._prelu_kernel_backward.default)
def prelu_backward(graph: OnnxGraph, grad: Operand, value: Operand, weight: Operand) -> Any:
    above, zero = _above(graph, value, 0), graph.scalar(0, grad.dtype)
    to_value = graph.op("Where", above, grad, graph.op("Mul", weight, grad))
    return to_value, graph.op("Where", above, zero, graph.op("Mul", value, grad))


@lowers(aten.hardtanh.default)
def hardtanh(graph: OnnxGraph, value: Operand, low: float = -1, high: float = 1) -> Any:
    return clamp(graph, value, low, high)


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(graph: OnnxGraph, grad: Operand, value: Operand, low: float, high: float) -> Any:
    under = graph.op("LessOrEqual", value, graph.scalar(low, value.dtype))
    over = graph.op("GreaterOrEqual", value, graph.scalar(high, value.dtype))
    return graph.op("Where", graph.op("Or", under, over), graph.scalar(0, grad.dtype), grad)


def _sixth(graph: OnnxGraph, value: Operand) -> Any:
    """min(max(x + 3, 0), 6) / 6"""
    raised = Operand(graph.op("Add", value, graph.scalar(3, value.dtype)), value.fake)
    return graph.op("Div", clamp(graph, raised, 0, 6), graph.scalar(6, value.dtype))


@lowers(aten.hardsigmoid.default)
def hardsigmoid(graph: OnnxGraph, value: Operand) -> Any:
    return _sixth(graph, value)


@lowers(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(graph: OnnxGraph, grad: Operand, value: Operand) -> Any:
    inside = graph.op("And", _above(graph, value, -3), _below(graph, value, 3))
    sixth = graph.op("Mul", grad, graph.scalar(1 / 6, grad.dtype))
    return graph.op("Where", inside, sixth, graph.scalar(0, grad.dtype))


@lowers(aten.hardswish.default)
def hardswish(graph: OnnxGraph, value: Operand) -> Any:
    return graph.op("Mul", value, _sixth(graph, value))


@lowers(aten.hardswish_backward.default)
def hardswish_backward(graph: OnnxGraph, grad: Operand, value: Operand) -> Any:
    dtype = value.dtype
    third = graph.op("Div", value, graph.scalar(3, dtype))
    slope = graph.op("Mul", grad, graph.op("Add", third, graph.scalar(0.5, dtype)))
    low = graph.op("LessOrEqual", value, graph.scalar(-3, dtype))
    inner = graph.op("Where", _below(graph, value, 3), slope, grad)
    return graph.op("Where", low, graph.scalar(0, dtype), inner)


@lowers(aten.hardshrink.default)
def hardshrink(graph: OnnxGraph, value: Operand, bound: float = 0.5) -> Any:
    return graph.op("Where", _within(graph, value, bound), graph.scalar(0, value.dtype), value)


@lowers(aten.softshrink.default)
def softshrink(graph: OnnxGraph, value: Operand, bound: float = 0.5) -> Any:
    dtype = value.dtype
    lower = graph.op("Sub", value, graph.scalar(bound, dtype))
    upper = graph.op("Add", value, graph.scalar(bound, dtype))
    moved = graph.op("Where", _above(graph, value, 0), lower, upper)
    return graph.op("Where", _within(graph, value, bound), graph.scalar(0, dtype), moved)


@lowers(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(graph: OnnxGraph, grad: Operand, value: Operand, bound: float) -> Any:
    return graph.op("Where", _within(graph, value, bound), graph.scalar(0, grad.dtype), grad)


def _within(graph: OnnxGraph, value: Operand, bound: float) -> Any:
    """Where a value lies between -bound and bound, both included."""
    return graph.op("LessOrEqual", graph.op("Abs", value), graph.scalar(bound, value.dtype))
