"""Activation functions and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch

from ort_accel.lowering.onnx_graph import MICROSOFT, NotLowerable, OnnxGraph, Operand, axis
from ort_accel.lowering.ops.elementwise import erf_of, expm1_of, log1p_of
from ort_accel.lowering.registry import lowers
from ort_accel.runtime.installed_ort import kernel_refusal

aten = torch.ops.aten


def _cube_sum(graph: OnnxGraph, operand: Operand) -> Any:
    """What the tanh of the approximate gelu is taken of."""
    cube = graph.op("Mul", graph.op("Mul", operand, operand), operand)
    inner = graph.op("Add", operand, graph.op("Mul", cube, graph.scalar(0.044715, operand.dtype)))
    return graph.op("Mul", inner, graph.scalar(math.sqrt(2 / math.pi), operand.dtype))


def _half_sum(graph: OnnxGraph, value: Any, dtype: torch.dtype) -> Any:
    """(1 + x) / 2"""
    return graph.op("Mul", graph.op("Add", value, graph.scalar(1, dtype)), graph.scalar(0.5, dtype))


def _cumulative(graph: OnnxGraph, operand: Operand) -> Any:
    """The share of a normal distribution that lies below."""
    dtype = operand.dtype
    erf = erf_of(graph, graph.op("Mul", operand, graph.scalar(math.sqrt(0.5), dtype)), dtype)
    return _half_sum(graph, erf, dtype)


@lowers(aten.gelu.default)
def gelu(graph: OnnxGraph, operand: Operand, approximate: str = "none") -> Any:
    if operand.dtype == torch.float64:  # the fused kernels compute in single precision
        tanh = _half_sum(graph, graph.op("Tanh", _cube_sum(graph, operand)), operand.dtype)
        return graph.op("Mul", operand, _cumulative(graph, operand) if approximate == "none" else tanh)
    if approximate == "none":
        return graph.op("Gelu", operand, domain=MICROSOFT)
    return graph.op("FastGelu", operand, None, domain=MICROSOFT)


@lowers(aten.gelu_backward.default)
def gelu_backward(graph: OnnxGraph, grad: Operand, operand: Operand, approximate: str = "none") -> Any:
    dtype = operand.dtype
    if dtype not in {torch.float32, torch.float64}:
        raise NotLowerable(f"the gradient of gelu in {dtype}")
    if approximate == "tanh" and dtype == torch.float32 and kernel_refusal("com.microsoft.FastGeluGrad") is None:
        return graph.op("FastGeluGrad", grad, operand, domain=MICROSOFT)
    slope = _gelu_slope(graph, operand) if approximate == "none" else _tanh_gelu_slope(graph, operand)
    return graph.op("Mul", grad, slope)


def _gelu_slope(graph: OnnxGraph, operand: Operand) -> Any:
    dtype = operand.dtype
    bell = graph.op("Exp", graph.op("Mul", graph.op("Mul", operand, operand), graph.scalar(-0.5, dtype)))
    density = graph.op("Mul", graph.op("Mul", operand, bell), graph.scalar(1 / math.sqrt(2 * math.pi), dtype))
    return graph.op("Add", _cumulative(graph, operand), density)


def _tanh_gelu_slope(graph: OnnxGraph, operand: Operand) -> Any:
    dtype, scale = operand.dtype, math.sqrt(2 / math.pi)
    one = graph.scalar(1, dtype)
    tanh = graph.op("Tanh", _cube_sum(graph, operand))
    square = graph.op("Mul", operand, operand)
    inner = graph.op(
        "Add", graph.op("Mul", square, graph.scalar(3 * 0.044715 * scale, dtype)), graph.scalar(scale, dtype)
    )
    steep = graph.op("Mul", graph.op("Sub", one, graph.op("Mul", tanh, tanh)), inner)
    half = graph.op("Mul", graph.op("Mul", operand, steep), graph.scalar(0.5, dtype))
    return graph.op("Add", _half_sum(graph, tanh, dtype), half)


@lowers(aten.silu.default)
def silu(graph: OnnxGraph, operand: Operand) -> Any:
    if operand.dtype == torch.float64:  # the other form is fused into a kernel that does not exist for it
        power = graph.op("Exp", graph.op("Neg", operand))
        return graph.op("Div", operand, graph.op("Add", power, graph.scalar(1, operand.dtype)))
    return graph.op("Mul", operand, graph.op("Sigmoid", operand))


@lowers(aten.silu_backward.default)
def silu_backward(graph: OnnxGraph, grad: Operand, operand: Operand) -> Any:
    one = graph.scalar(1, operand.dtype)
    gate = graph.op("Sigmoid", operand)
    slope = graph.op("Add", one, graph.op("Mul", operand, graph.op("Sub", one, gate)))
    return graph.op("Mul", grad, graph.op("Mul", gate, slope))


@lowers(aten.tanh_backward.default)
def tanh_backward(graph: OnnxGraph, grad: Operand, output: Operand) -> Any:
    one = graph.scalar(1, grad.dtype)
    return graph.op("Mul", grad, graph.op("Sub", one, graph.op("Mul", output, output)))


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(graph: OnnxGraph, grad: Operand, output: Operand) -> Any:
    slope = graph.op("Mul", output, graph.op("Sub", graph.scalar(1, grad.dtype), output))
    return graph.op("Mul", grad, slope)


def softplus_of(graph: OnnxGraph, value: Any, dtype: torch.dtype) -> Any:
    """log(1 + exp(x)) without overflow: max(x, 0) + log(1 + exp(-|x|))."""
    decay = graph.op("Exp", graph.op("Neg", graph.op("Abs", value)))
    return graph.op("Add", graph.op("Relu", value), log1p_of(graph, decay, dtype))


@lowers(aten.softplus.default)
def softplus(graph: OnnxGraph, operand: Operand, beta: float = 1, threshold: float = 20) -> Any:
    dtype = operand.dtype
    scaled = graph.op("Mul", operand, graph.scalar(beta, dtype))
    soft = graph.op("Div", softplus_of(graph, scaled, dtype), graph.scalar(beta, dtype))
    return graph.op("Where", graph.op("Greater", scaled, graph.scalar(threshold, dtype)), operand, soft)


@lowers(aten.softplus_backward.default)
def softplus_backward(graph: OnnxGraph, grad: Operand, operand: Operand, beta: float, threshold: float) -> Any:
    dtype = operand.dtype
    scaled = graph.op("Mul", operand, graph.scalar(beta, dtype))
    soft = graph.op("Mul", grad, graph.op("Sigmoid", scaled))
    return graph.op("Where", graph.op("Greater", scaled, graph.scalar(threshold, dtype)), grad, soft)


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid(graph: OnnxGraph, operand: Operand) -> Any:
    dtype, buffer = operand.dtype, graph.result[1]
    decay = graph.op("Exp", graph.op("Neg", graph.op("Abs", operand)))
    zero = graph.scalar(0, dtype)
    output = graph.op("Sub", graph.op("Min", operand, zero), log1p_of(graph, decay, dtype))
    return output, decay if buffer.ndim == operand.ndim else None


@lowers(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(graph: OnnxGraph, grad: Operand, operand: Operand, buffer: Operand) -> Any:
    return graph.op("Mul", grad, graph.op("Sigmoid", graph.op("Neg", operand)))


@lowers(aten.mish.default)
def mish(graph: OnnxGraph, operand: Operand) -> Any:
    return graph.op("Mul", operand, graph.op("Tanh", softplus_of(graph, operand, operand.dtype)))


@lowers(aten.mish_backward.default)
def mish_backward(graph: OnnxGraph, grad: Operand, operand: Operand) -> Any:
    dtype = operand.dtype
    tanh = graph.op("Tanh", softplus_of(graph, operand, dtype))
    steep = graph.op("Sub", graph.scalar(1, dtype), graph.op("Mul", tanh, tanh))
    slope = graph.op("Mul", graph.op("Mul", operand, graph.op("Sigmoid", operand)), steep)
    return graph.op("Mul", grad, graph.op("Add", tanh, slope))


@lowers(aten.elu.default)
def elu(graph: OnnxGraph, operand: Operand, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    dtype = operand.dtype
    power = expm1_of(graph, graph.op("Mul", operand, graph.scalar(input_scale, dtype)), dtype)
    below = graph.op("Mul", power, graph.scalar(alpha * scale, dtype))
    above = graph.op("Mul", operand, graph.scalar(scale, dtype))
    return graph.op("Where", graph.op("LessOrEqual", operand, graph.scalar(0, dtype)), below, above)


@lowers(aten.celu.default)
def celu(graph: OnnxGraph, operand: Operand, alpha: float = 1) -> Any:
    return elu(graph, operand, alpha, 1, 1 / alpha)


@lowers(aten.elu_backward.default)
def elu_backward(
    graph: OnnxGraph, grad: Operand, alpha: float, scale: float, input_scale: float, is_result: bool, value: Operand
) -> Any:
    dtype, steep = value.dtype, alpha * scale
    if is_result:
        slope = graph.op("Add", value, graph.scalar(steep, dtype))
    else:
        power = graph.op("Exp", graph.op("Mul", value, graph.scalar(input_scale, dtype)))
        slope = graph.op("Mul", power, graph.scalar(steep, dtype))
    below = graph.op("Mul", grad, graph.op("Mul", slope, graph.scalar(input_scale, dtype)))
    above = graph.op("Mul", grad, graph.scalar(scale, dtype))
    return graph.op("Where", graph.op("LessOrEqual", value, graph.scalar(0, dtype)), below, above)


@lowers(aten.glu.default)
def glu(graph: OnnxGraph, operand: Operand, dim: int = -1) -> Any:
    value, gate = _halves(graph, operand, dim)
    return graph.op("Mul", value, graph.op("Sigmoid", gate))


@lowers(aten.glu_backward.default)
def glu_backward(graph: OnnxGraph, grad: Operand, operand: Operand, dim: int) -> Any:
    value, gate = _halves(graph, operand, dim)
    open_ = graph.op("Sigmoid", gate)
    slope = graph.op("Mul", graph.op("Sub", graph.scalar(1, operand.dtype), open_), open_)
    halves = [graph.op("Mul", grad, open_), graph.op("Mul", graph.op("Mul", slope, grad), value)]
    return graph.op("Concat", *halves, axis=axis(dim, operand.ndim))


def _halves(graph: OnnxGraph, operand: Operand, dim: int) -> Any:
    dim = axis(dim, operand.ndim)
    half = operand.shape[dim] // 2
    return graph.op("Split", operand, graph.sizes([half, half]), axis=dim, outputs=2)
