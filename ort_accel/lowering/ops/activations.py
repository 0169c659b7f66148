"""Activation functions and their gradients."""

from __future__ import annotations

import math

import torch

from ort_accel.kernels.gated import APPROXIMATIONS, own
from ort_accel.lowering.onnx_graph import MICROSOFT, NotLowerable, OnnxGraph, Operand, Value, axis
from ort_accel.lowering.ops.elementwise import erf_of, expm1_of, log1p_of
from ort_accel.lowering.registry import lowers
from ort_accel.lowering.term import Result, Term, exp, relu, sigmoid, tanh, term
from ort_accel.runtime.installed_ort import kernel_refusal

aten = torch.ops.aten

TANH_SCALE = math.sqrt(2 / math.pi)


def _tanh_argument(x: Term) -> Term:
    """Return the number of whose tanh the approximate gelu consists."""
    return (x + x * x * x * 0.044715) * TANH_SCALE


def _half_above_minus_one(x: Term) -> Term:
    return (x + 1) * 0.5


def _normal_cdf(x: Term) -> Term:
    return _half_above_minus_one(erf_of(x * math.sqrt(0.5)))


@lowers(aten.gelu.default)
def gelu(graph: OnnxGraph, operand: Operand, approximate: str = "none") -> Result:
    if operand.dtype == torch.float64:  # the fused kernels compute in single precision
        x = term(graph, operand)
        return x * (_normal_cdf(x) if approximate == "none" else _half_above_minus_one(tanh(_tanh_argument(x))))
    if approximate == "none":
        return graph.op("Gelu", operand, domain=MICROSOFT)
    return graph.op("FastGelu", operand, None, domain=MICROSOFT)


@lowers(aten.gelu_backward.default)
def gelu_backward(graph: OnnxGraph, grad: Operand, operand: Operand, approximate: str = "none") -> Result:
    dtype, x = operand.dtype, term(graph, operand)
    if dtype not in {torch.float32, torch.float64}:
        raise NotLowerable(f"the gradient of gelu in {dtype}")
    if approximate == "tanh" and dtype == torch.float32 and kernel_refusal("com.microsoft.FastGeluGrad") is None:
        return graph.op("FastGeluGrad", grad, operand, domain=MICROSOFT)
    return term(graph, grad) * (_gelu_slope(x) if approximate == "none" else _tanh_gelu_slope(x))


def _gelu_slope(x: Term) -> Term:
    density = exp(x * x * -0.5)
    return _normal_cdf(x) + x * density * (1 / math.sqrt(2 * math.pi))


def _tanh_gelu_slope(x: Term) -> Term:
    y = tanh(_tanh_argument(x))
    steep = (1 - y * y) * (x * x * (3 * 0.044715 * TANH_SCALE) + TANH_SCALE)
    return _half_above_minus_one(y) + x * steep * 0.5


@lowers(aten.silu.default)
def silu(graph: OnnxGraph, operand: Operand) -> Result:
    x = term(graph, operand)
    if operand.dtype == torch.float64:  # the other form is fused into a kernel that does not exist for it
        return x / (exp(-x) + 1)
    return x * sigmoid(x)


@lowers(aten.silu_backward.default)
def silu_backward(graph: OnnxGraph, grad: Operand, operand: Operand) -> Result:
    x = term(graph, operand)
    gate = sigmoid(x)
    return term(graph, grad) * (gate * (1 + x * (1 - gate)))


@lowers(own.gated.default)
def gated(graph: OnnxGraph, gate: Operand, up: Operand, activation: str) -> Term:
    return _activated(graph, gate, activation) * up


@lowers(own.gated_backward.default)
def gated_backward(graph: OnnxGraph, grad: Operand, gate: Operand, up: Operand, activation: str) -> tuple[Result, Term]:
    given = term(graph, grad)
    scaled = Operand((given * up).value, grad.fake)
    if activation == "silu":
        to_gate = silu_backward(graph, scaled, gate)
    else:
        to_gate = gelu_backward(graph, scaled, gate, APPROXIMATIONS[activation])
    return to_gate, given * _activated(graph, gate, activation)


def _activated(graph: OnnxGraph, gate: Operand, activation: str) -> Term:
    found = silu(graph, gate) if activation == "silu" else gelu(graph, gate, APPROXIMATIONS[activation])
    return found if isinstance(found, Term) else Term(graph, found, gate.dtype)


@lowers(aten.tanh_backward.default)
def tanh_backward(graph: OnnxGraph, grad: Operand, output: Operand) -> Result:
    y = term(graph, output)
    return term(graph, grad) * (1 - y * y)


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(graph: OnnxGraph, grad: Operand, output: Operand) -> Result:
    y = term(graph, output)
    return term(graph, grad) * (y * (1 - y))


def softplus_of(x: Term) -> Term:
    """Return log(1 + exp(x)) without overflow: max(x, 0) + log(1 + exp(-|x|))."""
    return relu(x) + log1p_of(exp(-abs(x)))


@lowers(aten.softplus.default)
def softplus(graph: OnnxGraph, operand: Operand, beta: float = 1, threshold: float = 20) -> Result:
    x = term(graph, operand)
    scaled = x * beta
    return x.where(scaled > threshold, softplus_of(scaled) / beta)


@lowers(aten.softplus_backward.default)
def softplus_backward(graph: OnnxGraph, grad: Operand, operand: Operand, beta: float, threshold: float) -> Result:
    given, scaled = term(graph, grad), term(graph, operand) * beta
    return given.where(scaled > threshold, given * sigmoid(scaled))


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid(graph: OnnxGraph, operand: Operand) -> tuple[Result, Result | None]:
    x, buffer = term(graph, operand), graph.result[1]
    decay = exp(-abs(x))
    return x.op("Min", 0) - log1p_of(decay), decay if buffer.ndim == operand.ndim else None


@lowers(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(graph: OnnxGraph, grad: Operand, operand: Operand, buffer: Operand) -> Result:
    return term(graph, grad) * sigmoid(-term(graph, operand))


@lowers(aten.mish.default)
def mish(graph: OnnxGraph, operand: Operand) -> Result:
    x = term(graph, operand)
    return x * tanh(softplus_of(x))


@lowers(aten.mish_backward.default)
def mish_backward(graph: OnnxGraph, grad: Operand, operand: Operand) -> Result:
    x = term(graph, operand)
    y = tanh(softplus_of(x))
    return term(graph, grad) * (y + x * sigmoid(x) * (1 - y * y))


@lowers(aten.elu.default)
def elu(graph: OnnxGraph, operand: Operand, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Result:
    x = term(graph, operand)
    return (expm1_of(x * input_scale) * (alpha * scale)).where(x <= 0, x * scale)


@lowers(aten.celu.default)
def celu(graph: OnnxGraph, operand: Operand, alpha: float = 1) -> Result:
    return elu(graph, operand, alpha, 1, 1 / alpha)


@lowers(aten.elu_backward.default)
def elu_backward(
    graph: OnnxGraph, grad: Operand, alpha: float, scale: float, input_scale: float, is_result: bool, value: Operand
) -> Result:
    given, x, steep = term(graph, grad), term(graph, value), alpha * scale
    slope = x + steep if is_result else exp(x * input_scale) * steep
    return (given * (slope * input_scale)).where(x <= 0, given * scale)


@lowers(aten.glu.default)
def glu(graph: OnnxGraph, operand: Operand, dim: int = -1) -> Result:
    value, gate = _halves(graph, operand, dim)
    return value * sigmoid(gate)


@lowers(aten.glu_backward.default)
def glu_backward(graph: OnnxGraph, grad: Operand, operand: Operand, dim: int) -> Value:
    given, (value, gate) = term(graph, grad), _halves(graph, operand, dim)
    opening = sigmoid(gate)
    slope = (1 - opening) * opening
    return graph.op("Concat", given * opening, slope * given * value, axis=axis(dim, operand.ndim))


def _halves(graph: OnnxGraph, operand: Operand, dim: int) -> tuple[Term, Term]:
    dim = axis(dim, operand.ndim)
    half = operand.shape[dim] // 2
    first, second = graph.op_with_outputs("Split", 2, operand, graph.sizes([half, half]), axis=dim)
    return Term(graph, first, operand.dtype), Term(graph, second, operand.dtype)
