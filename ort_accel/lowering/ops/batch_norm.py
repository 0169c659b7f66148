"""Batch norm with its running statistics, and the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ort_accel.lowering.onnx_graph import Input, NotLowerable, OnnxGraph, Operand, Value
from ort_accel.lowering.ops.norms import by_channel, inverse_root, mean_over, one_dtype, standardized_gradient, sum_over
from ort_accel.lowering.ops.reductions import not_empty
from ort_accel.lowering.registry import lowers
from ort_accel.lowering.single_precision import in_single_precision
from ort_accel.lowering.term import Result, Term, term

aten = torch.ops.aten


def _over(operand: Operand) -> list[int]:
    """Return all dimensions but the channel's."""
    return [0, *range(2, operand.ndim)]


@dataclass(frozen=True)
class _Affine:
    """The tensor of a batch norm, and the weight and bias of its channels."""

    graph: OnnxGraph
    operand: Operand
    weight: Operand | None
    bias: Operand | None

    def normalized(self, mean: Input, inverse: Input) -> Term:
        """Return the normalized tensor, scaled and moved."""
        mean, inverse, weight, bias = (
            None if item is None else by_channel(self.graph, item, self.operand.ndim)
            for item in (mean, inverse, self.weight, self.bias)
        )
        value = (term(self.graph, self.operand) - mean) * inverse
        value = value if weight is None else value * weight
        return value if bias is None else value + bias

    def from_batch(self, epsilon: float) -> tuple[Term, Term, Term, Term]:
        """Return the normalized tensor, and mean, variance and one over the deviation of each channel."""
        not_empty(self.operand)
        one_dtype(self.operand, self.weight, self.bias)
        x = term(self.graph, self.operand)
        wide_mean = mean_over(x, _over(self.operand))
        centered = x - wide_mean
        wide_variance = mean_over(centered * centered, _over(self.operand))
        mean, variance = (item.op("Reshape", self.graph.ints([-1])) for item in (wide_mean, wide_variance))
        inverse = inverse_root(variance, epsilon)
        return self.normalized(mean, inverse), mean, variance, inverse

    def from_running(self, mean: Operand, variance: Operand, epsilon: float) -> Term:
        """Return the tensor normalized by running statistics."""
        one_dtype(self.operand, self.weight, self.bias, mean, variance)
        return self.normalized(mean, inverse_root(term(self.graph, variance), epsilon))


def _unused(graph: OnnxGraph, operand: Operand, fake: torch.Tensor) -> Value:
    """Return PyTorch's placeholder for statistics that were not computed."""
    return graph.op("Expand", graph.scalar(0, operand.dtype), graph.sizes(fake.shape))


def _moving_average(running: Term, new: Term, momentum: float) -> Term:
    return running * (1 - momentum) + new * momentum


@lowers(aten._native_batch_norm_legit_functional.default)
@in_single_precision
def batch_norm_functional(
    graph: OnnxGraph,
    operand: Operand,
    weight: Operand | None,
    bias: Operand | None,
    mean: Operand,
    variance: Operand,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[Result, ...]:
    affine = _Affine(graph, operand, weight, bias)
    if not training:
        value = affine.from_running(mean, variance, epsilon)
        return value, *(_unused(graph, operand, fake) for fake in graph.result[1:3]), mean.value, variance.value
    dtype = one_dtype(operand, weight, bias, mean, variance)
    value, new_mean, new_variance, inverse = affine.from_batch(epsilon)
    count = Term(graph, graph.scalar(math.prod(operand.shape[dim] for dim in _over(operand)), dtype), dtype)
    unbiased = new_variance * count / (count - 1)
    running_mean = _moving_average(term(graph, mean), new_mean, momentum)
    return value, new_mean, inverse, running_mean, _moving_average(term(graph, variance), unbiased, momentum)


@lowers(aten._native_batch_norm_legit.no_stats)
@in_single_precision
def batch_norm_without_running(
    graph: OnnxGraph,
    operand: Operand,
    weight: Operand | None,
    bias: Operand | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[Result, ...]:
    value, mean, _, inverse = _Affine(graph, operand, weight, bias).from_batch(epsilon)
    return value, mean, inverse


@lowers(aten._native_batch_norm_legit_no_training.default)
@in_single_precision
def batch_norm_eval(
    graph: OnnxGraph,
    operand: Operand,
    weight: Operand | None,
    bias: Operand | None,
    mean: Operand,
    variance: Operand,
    momentum: float,
    epsilon: float,
) -> tuple[Result, ...]:
    value = _Affine(graph, operand, weight, bias).from_running(mean, variance, epsilon)
    return value, *(_unused(graph, operand, fake) for fake in graph.result[1:])


@lowers(aten.native_batch_norm_backward.default)
@in_single_precision
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
) -> tuple[Result | None, ...]:
    not_empty(operand)
    axes, dtype = _over(operand), one_dtype(grad, operand, weight)
    mean: Input
    inverse: Input
    if training:
        mean, inverse = saved_mean, saved_inverse
    elif running_variance is not None:
        mean, inverse = running_mean, inverse_root(term(graph, running_variance), epsilon)
    else:
        raise NotLowerable("the gradient of a batch norm without statistics")
    wide_inverse = Term(graph, by_channel(graph, inverse, operand.ndim), dtype)
    given = term(graph, grad)
    normal = (term(graph, operand) - by_channel(graph, mean, operand.ndim)) * wide_inverse
    scaled = given if weight is None else given * by_channel(graph, weight, operand.ndim)
    to_operand = standardized_gradient(scaled, normal, wide_inverse, axes) if training else scaled * wide_inverse
    return (
        to_operand if wanted[0] else None,
        sum_over(given * normal, axes) if wanted[1] else None,
        sum_over(given, axes) if wanted[2] else None,
    )
