"""Activation functions made of straight pieces, and their gradients."""

from __future__ import annotations

import torch

from ort_accel.lowering.onnx_graph import OnnxGraph, Operand
from ort_accel.lowering.ops.arithmetic import clamp
from ort_accel.lowering.registry import lowers
from ort_accel.lowering.term import Result, Term, term

aten = torch.ops.aten


def _zero(graph: OnnxGraph, like: Operand) -> Term:
    return Term(graph, graph.scalar(0, like.dtype), like.dtype)


@lowers(aten.threshold.default)
def threshold(graph: OnnxGraph, value: Operand, bound: float, number: float) -> Result:
    x = term(graph, value)
    return Term(graph, graph.scalar(number, x.dtype), x.dtype).where(x <= bound, x)


@lowers(aten.threshold_backward.default)
def threshold_backward(graph: OnnxGraph, grad: Operand, value: Operand, bound: float) -> Result:
    """The gradient passes where the value is NaN."""
    return _zero(graph, grad).where(term(graph, value) <= bound, grad)


@lowers(aten.leaky_relu.default)
def leaky_relu(graph: OnnxGraph, value: Operand, slope: float = 0.01) -> Result:
    x = term(graph, value)
    return x.where(x > 0, x * slope)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(graph: OnnxGraph, grad: Operand, value: Operand, slope: float, is_result: bool) -> Result:
    given = term(graph, grad)
    return given.where(term(graph, value) > 0, given * slope)


@lowers(aten._prelu_kernel.default)
def prelu(graph: OnnxGraph, value: Operand, weight: Operand) -> Result:
    x = term(graph, value)
    return x.where(x > 0, term(graph, weight) * x)


@lowers(aten._prelu_kernel_backward.default)
def prelu_backward(graph: OnnxGraph, grad: Operand, value: Operand, weight: Operand) -> tuple[Result, Result]:
    given, x = term(graph, grad), term(graph, value)
    above = x > 0
    return given.where(above, term(graph, weight) * given), _zero(graph, grad).where(above, x * given)


@lowers(aten.hardtanh.default)
def hardtanh(graph: OnnxGraph, value: Operand, low: float = -1, high: float = 1) -> Result:
    return clamp(graph, value, low, high)


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(graph: OnnxGraph, grad: Operand, value: Operand, low: float, high: float) -> Result:
    x = term(graph, value)
    return _zero(graph, grad).where((x <= low).op("Or", x >= high), grad)


def _sixth(graph: OnnxGraph, value: Operand) -> Term:
    """Return min(max(x + 3, 0), 6) / 6."""
    raised = Operand((term(graph, value) + 3).value, value.fake)
    return Term(graph, clamp(graph, raised, 0, 6), value.dtype) / 6


@lowers(aten.hardsigmoid.default)
def hardsigmoid(graph: OnnxGraph, value: Operand) -> Result:
    return _sixth(graph, value)


@lowers(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(graph: OnnxGraph, grad: Operand, value: Operand) -> Result:
    x = term(graph, value)
    return (term(graph, grad) * (1 / 6)).where((x > -3).op("And", x < 3), 0)


@lowers(aten.hardswish.default)
def hardswish(graph: OnnxGraph, value: Operand) -> Result:
    return term(graph, value) * _sixth(graph, value)


@lowers(aten.hardswish_backward.default)
def hardswish_backward(graph: OnnxGraph, grad: Operand, value: Operand) -> Result:
    given, x = term(graph, grad), term(graph, value)
    inner = (given * (x / 3 + 0.5)).where(x < 3, given)
    return _zero(graph, value).where(x <= -3, inner)


@lowers(aten.hardshrink.default)
def hardshrink(graph: OnnxGraph, value: Operand, bound: float = 0.5) -> Result:
    return _zero(graph, value).where(abs(term(graph, value)) <= bound, value)


@lowers(aten.softshrink.default)
def softshrink(graph: OnnxGraph, value: Operand, bound: float = 0.5) -> Result:
    x = term(graph, value)
    moved = (x - bound).where(x > 0, x + bound)
    return _zero(graph, value).where(abs(x) <= bound, moved)


@lowers(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(graph: OnnxGraph, grad: Operand, value: Operand, bound: float) -> Result:
    return _zero(graph, grad).where(abs(term(graph, value)) <= bound, grad)
