"""Normalization over a batch, with its running statistics, and the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch

from ort_accel.lowering.onnx_graph import HALVES, NotLowerable, OnnxGraph, Operand
from ort_accel.lowering.ops.norms import inverse_root, mean_over, one_dtype, standardized_gradient, sum_over
from ort_accel.lowering.ops.reductions import not_empty
from ort_accel.lowering.registry import Lowering, lowers

aten = torch.ops.aten


def _rounded_once(lowering: Lowering) -> Lowering:
    """Half-precision numbers are computed with in single precision, and only the results are rounded."""

    @wraps(lowering)
    def wide(graph: OnnxGraph, *args: Any) -> Any:
        if not any(isinstance(item, Operand) and item.dtype in HALVES for item in args):
            return lowering(graph, *args)
        results = lowering(graph, *(_in_single(graph, item) if isinstance(item, Operand) else item for item in args))
        promised = zip(results, graph.result, strict=True)
        return tuple(value and graph.cast_from(value, torch.float32, fake.dtype) for value, fake in promised)

    return wide


def _in_single(graph: OnnxGraph, operand: Operand) -> Operand:
    return Operand(graph.cast(operand, torch.float32), operand.fake.to(torch.float32))


def _over(operand: Operand) -> list[int]:
    """All dimensions but the channel's."""
    return [0, *range(2, operand.ndim)]


def _wide(graph: OnnxGraph, value: Any, operand: Operand) -> Any:
    """One number a channel, to be combined with the whole tensor."""
    return graph.op("Reshape", value, graph.ints([1, -1] + [1] * (operand.ndim - 2)))


def _applied(graph: OnnxGraph, operand: Operand, mean: Any, inverse: Any, weight: Any, bias: Any) -> Any:
    value = graph.op("Mul", graph.op("Sub", operand, _wide(graph, mean, operand)), _wide(graph, inverse, operand))
    if weight is not None:
        value = graph.op("Mul", value, _wide(graph, weight, operand))
    return value if bias is None else graph.op("Add", value, _wide(graph, bias, operand))


def _trained(graph: OnnxGraph, operand: Operand, weight: Any, bias: Any, epsilon: float) -> tuple[Any, Any, Any, Any]:
    """The normalized tensor, and mean, variance and one over the deviation of each channel."""
    not_empty(operand)
    dtype = one_dtype(operand, weight, bias)
    wide_mean = mean_over(graph, operand, _over(operand))
    centered = graph.op("Sub", operand, wide_mean)
    wide_variance = mean_over(graph, graph.op("Mul", centered, centered), _over(operand))
    mean, variance = (graph.op("Reshape", item, graph.ints([-1])) for item in (wide_mean, wide_variance))
    inverse = inverse_root(graph, variance, epsilon, dtype)
    return _applied(graph, operand, mean, inverse, weight, bias), mean, variance, inverse


def _kept(
    graph: OnnxGraph, operand: Operand, weight: Any, bias: Any, mean: Operand, variance: Operand, epsilon: float
) -> Any:
    """Normalized by statistics of the past."""
    dtype = one_dtype(operand, weight, bias, mean, variance)
    return _applied(graph, operand, mean, inverse_root(graph, variance, epsilon, dtype), weight, bias)


def _unused(graph: OnnxGraph, operand: Operand, fake: torch.Tensor) -> Any:
    """What PyTorch gives for statistics that were not computed."""
    return graph.op("Expand", graph.scalar(0, operand.dtype), graph.sizes(fake.shape))


def _moved(graph: OnnxGraph, running: Operand, new: Any, momentum: float) -> Any:
    dtype = running.dtype
    old = graph.op("Mul", running, graph.scalar(1 - momentum, dtype))
    return graph.op("Add", old, graph.op("Mul", new, graph.scalar(momentum, dtype)))


@lowers(aten._native_batch_norm_legit_functional.default)
@_rounded_once
def batch_norm_functional(
    graph: OnnxGraph,
    operand: Operand,
    weight: Any,
    bias: Any,
    mean: Operand,
    variance: Operand,
    training: bool,
    momentum: float,
    epsilon: float,
) -> Any:
    if not training:
        value = _kept(graph, operand, weight, bias, mean, variance, epsilon)
        return value, *(_unused(graph, operand, fake) for fake in graph.result[1:3]), mean.value, variance.value
    dtype = one_dtype(operand, weight, bias, mean, variance)
    value, new_mean, new_variance, inverse = _trained(graph, operand, weight, bias, epsilon)
    count: Any = math.prod(operand.shape[dim] for dim in _over(operand))
    unbiased = graph.op("Mul", new_variance, graph.scalar(count, dtype))
    unbiased = graph.op("Div", unbiased, graph.op("Sub", graph.scalar(count, dtype), graph.scalar(1, dtype)))
    running = _moved(graph, mean, new_mean, momentum), _moved(graph, variance, unbiased, momentum)
    return value, new_mean, inverse, *running


@lowers(aten._native_batch_norm_legit.no_stats)
@_rounded_once
def batch_norm_without_past(
    graph: OnnxGraph, operand: Operand, weight: Any, bias: Any, training: bool, momentum: float, epsilon: float
) -> Any:
    value, mean, _, inverse = _trained(graph, operand, weight, bias, epsilon)
    return value, mean, inverse


@lowers(aten._native_batch_norm_legit_no_training.default)
@_rounded_once
def batch_norm_eval(
    graph: OnnxGraph,
    operand: Operand,
    weight: Any,
    bias: Any,
    mean: Operand,
    variance: Operand,
    momentum: float,
    epsilon: float,
) -> Any:
    value = _kept(graph, operand, weight, bias, mean, variance, epsilon)
    return value, *(_unused(graph, operand, fake) for fake in graph.result[1:])


@lowers(aten.native_batch_norm_backward.default)
@_rounded_once
def batch_norm_backward(
    graph: OnnxGraph,
    grad: Operand,
    operand: Operand,
    weight: Operand | None,
    running_mean: Operand | None,
    running_variance: Operand | None,
    saved_mean: Operand | None,
    saved_inverse: Operand | None,
    training: bool,
    epsilon: float,
    wanted: Sequence[bool],
) -> Any:
    not_empty(operand)
    axes, dtype = _over(operand), one_dtype(grad, operand, weight)
    mean: Any
    inverse: Any
    if training:
        mean, inverse = saved_mean, saved_inverse
    elif running_variance is not None:
        mean, inverse = running_mean, inverse_root(graph, running_variance, epsilon, dtype)
    else:
        raise NotLowerable("the gradient of a batch norm without statistics")
    wide_inverse = _wide(graph, inverse, operand)
    normal = graph.op("Mul", graph.op("Sub", operand, _wide(graph, mean, operand)), wide_inverse)
    scaled = grad.value if weight is None else graph.op("Mul", grad, _wide(graph, weight, operand))
    if training:
        to_operand = standardized_gradient(graph, scaled, normal, wide_inverse, axes)
    else:
        to_operand = graph.op("Mul", scaled, wide_inverse)
    return (
        to_operand if wanted[0] else None,
        sum_over(graph, graph.op("Mul", grad, normal), axes) if wanted[1] else None,
        sum_over(graph, grad.value, axes) if wanted[2] else None,
    )
