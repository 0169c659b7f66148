"""Losses and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand
from ort_accel.lowering.ops.indexing import without_negatives
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""The reductions, as ATen numbers them."""


class Labels:
    """The labels of a classification; those to ignore are found, and those that are no class make ONNX Runtime fail."""

    def __init__(self, graph: OnnxGraph, scores: Operand, target: Operand, ignore_index: Size) -> None:
        self._graph, self._dtype = graph, scores.dtype
        self.is_single = scores.ndim == 1
        self.classes = scores.shape[0 if self.is_single else 1]
        self.axis = 0 if self.is_single else 1
        labels = graph.cast(target, torch.int64)
        ignored = graph.op("Equal", labels, graph.scalar(ignore_index, torch.int64))
        self.valid = graph.op("Not", ignored)
        classes = without_negatives(graph, target, self.classes)
        self.places = graph.op("Where", ignored, graph.scalar(0, torch.int64), classes)

    def along_classes(self, value: Any) -> Any:
        """One number for each label, with a dimension for the classes."""
        return self._graph.op("Unsqueeze", value, self._graph.ints([self.axis]))

    def picked(self, scores: Operand) -> Any:
        """The score of each label."""
        found = self._graph.op("GatherElements", scores, self.along_classes(self.places), axis=self.axis)
        return self._graph.op("Squeeze", found, self._graph.ints([self.axis]))

    def weights(self, weight: Operand | None) -> Any:
        """The weight of each label: zero where it is ignored."""
        if weight is None:
            return self._graph.cast_from(self.valid, torch.bool, self._dtype)
        return self.where_valid(self._graph.op("Gather", weight, self.places, axis=0))

    def where_valid(self, value: Any) -> Any:
        """Zero where a label is ignored."""
        return self._graph.op("Where", self.valid, value, self._graph.scalar(0, self._dtype))


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    graph: OnnxGraph, scores: Operand, target: Operand, weight: Operand | None, reduction: int, ignore_index: Size
) -> Any:
    labels = Labels(graph, scores, target, ignore_index)
    negative = graph.op("Neg", labels.picked(scores))
    weights = labels.weights(weight)
    weighted = negative if weight is None else graph.op("Mul", negative, weights)
    losses = labels.where_valid(weighted)
    if reduction == NONE:
        return losses, weights if labels.is_single else graph.scalar(0, scores.dtype)
    loss, total = graph.op("ReduceSum", losses, keepdims=0), graph.op("ReduceSum", weights, keepdims=0)
    return graph.op("Div", loss, total) if reduction == MEAN else loss, total


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    graph: OnnxGraph,
    grad: Operand,
    scores: Operand,
    target: Operand,
    weight: Operand | None,
    reduction: int,
    ignore_index: Size,
    total_weight: Operand,
) -> Any:
    labels = Labels(graph, scores, target, ignore_index)
    updates = graph.op("Neg", shares(graph, labels, grad, weight, reduction, total_weight))
    zeros = graph.op("Expand", graph.scalar(0, scores.dtype), graph.sizes(scores.shape))
    places = labels.along_classes(labels.places)
    return graph.op("ScatterElements", zeros, places, labels.along_classes(updates), axis=labels.axis)


def shares(
    graph: OnnxGraph, labels: Labels, grad: Operand, weight: Operand | None, reduction: int, total_weight: Operand
) -> Any:
    """The part of the loss's gradient that each label gets: zero where it is ignored."""
    share = grad.value
    if reduction == MEAN:
        share = graph.op("Div", share, total_weight)
    if weight is not None:
        share = graph.op("Mul", share, labels.weights(weight))
    return labels.where_valid(share)


def reduced(graph: OnnxGraph, losses: Any, shape: Any, reduction: int) -> Any:
    """The losses of single elements, their mean or their sum."""
    if reduction == NONE:
        return losses
    if any(size == 0 for size in shape if isinstance(size, int)):
        raise NotLowerable("a loss of nothing")
    return graph.op("ReduceMean" if reduction == MEAN else "ReduceSum", losses, keepdims=0)


def share_of(graph: OnnxGraph, grad: Operand, shape: Any, reduction: int) -> Any:
    """The part of a loss's gradient that each element gets."""
    if reduction != MEAN:
        return grad.value
    return graph.op("Div", grad, graph.scalar(math.prod(shape), grad.dtype))


def _broadcast(operand: Operand, target: Operand) -> Any:
    return torch.broadcast_tensors(operand.fake, target.fake)[0].shape  # type: ignore[no-untyped-call]


Elementwise = Callable[[OnnxGraph, Any, torch.dtype, float], Any]
"""A function of the difference between output and target, or its slope; the last argument is beta or delta."""


def _difference_loss(element: Elementwise) -> Callable[..., Any]:
    def lowering(
        graph: OnnxGraph, operand: Operand, target: Operand, reduction: int = MEAN, parameter: float = 1.0
    ) -> Any:
        losses = element(graph, graph.op("Sub", operand, target), operand.dtype, parameter)
        return reduced(graph, losses, _broadcast(operand, target), reduction)

    return lowering


def _difference_loss_backward(slope: Elementwise) -> Callable[..., Any]:
    def lowering(
        graph: OnnxGraph, grad: Operand, operand: Operand, target: Operand, reduction: int, parameter: float = 1.0
    ) -> Any:
        slopes = slope(graph, graph.op("Sub", operand, target), operand.dtype, parameter)
        return graph.op("Mul", slopes, share_of(graph, grad, _broadcast(operand, target), reduction))

    return lowering


def _square(graph: OnnxGraph, difference: Any, dtype: torch.dtype, _: float) -> Any:
    return graph.op("Mul", difference, difference)


def _square_slope(graph: OnnxGraph, difference: Any, dtype: torch.dtype, _: float) -> Any:
    return graph.op("Mul", difference, graph.scalar(2, dtype))


def _smooth(graph: OnnxGraph, difference: Any, dtype: torch.dtype, beta: float) -> Any:
    """A parabola near zero, which becomes a line at `beta`."""
    distance = graph.op("Abs", difference)
    if beta == 0:
        return distance
    parabola = graph.op("Mul", graph.op("Mul", distance, distance), graph.scalar(0.5 / beta, dtype))
    line = graph.op("Sub", distance, graph.scalar(0.5 * beta, dtype))
    return graph.op("Where", graph.op("Less", distance, graph.scalar(beta, dtype)), parabola, line)


def _smooth_slope(graph: OnnxGraph, difference: Any, dtype: torch.dtype, beta: float) -> Any:
    if beta == 0:
        return graph.op("Sign", difference)
    distance = graph.op("Abs", difference)
    near = graph.op("Less", distance, graph.scalar(beta, dtype))
    return graph.op("Where", near, graph.op("Div", difference, graph.scalar(beta, dtype)), graph.op("Sign", difference))


def _huber(graph: OnnxGraph, difference: Any, dtype: torch.dtype, delta: float) -> Any:
    return graph.op("Mul", _smooth(graph, difference, dtype, delta), graph.scalar(delta, dtype))


def _huber_slope(graph: OnnxGraph, difference: Any, dtype: torch.dtype, delta: float) -> Any:
    return graph.op("Mul", _smooth_slope(graph, difference, dtype, delta), graph.scalar(delta, dtype))


for name, (element, slope) in {
    "mse_loss": (_square, _square_slope),
    "smooth_l1_loss": (_smooth, _smooth_slope),
    "huber_loss": (_huber, _huber_slope),
}.items():
    lowers(getattr(aten, name).default)(_difference_loss(element))
    lowers(getattr(aten, f"{name}_backward").default)(_difference_loss_backward(slope))


def _weighted(graph: OnnxGraph, value: Any, weight: Operand | None) -> Any:
    return value if weight is None else graph.op("Mul", value, weight)


@lowers(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    graph: OnnxGraph,
    logits: Operand,
    target: Operand,
    weight: Operand | None = None,
    positive_weight: Operand | None = None,
    reduction: int = MEAN,
) -> Any:
    one = graph.scalar(1, logits.dtype)
    against = graph.op("Softplus", graph.op("Neg", logits))  # -log(sigmoid(logits))
    if positive_weight is not None:
        extra = graph.op("Mul", graph.op("Sub", positive_weight, one), target)
        against = graph.op("Mul", against, graph.op("Add", extra, one))
    losses = graph.op("Add", graph.op("Mul", graph.op("Sub", one, target), logits), against)
    return reduced(graph, _weighted(graph, losses, weight), logits.shape, reduction)


@lowers(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    graph: OnnxGraph,
    grad: Operand,
    operand: Operand,
    target: Operand,
    weight: Operand | None = None,
    reduction: int = MEAN,
) -> Any:
    one = graph.scalar(1, operand.dtype)
    spread = graph.op("Mul", graph.op("Sub", one, operand), operand)
    slope = graph.op(
        "Div", graph.op("Sub", operand, target), graph.op("Max", spread, graph.scalar(1e-12, operand.dtype))
    )
    return graph.op("Mul", _weighted(graph, slope, weight), share_of(graph, grad, operand.shape, reduction))


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(graph: OnnxGraph, *args: Any) -> Any:
    raise NotLowerable("PyTorch checks that all probabilities lie between zero and one")


def _exponential(graph: OnnxGraph, operand: Operand, target: Operand) -> tuple[Any, Any, Any]:
    """exp(-target * operand) as eager has it, which overflows; one more than it; and -target."""
    if operand.dtype == torch.float16:
        raise NotLowerable("it overflows in float16, where ONNX Runtime computes in single precision on a CPU")
    away = graph.op("Neg", target)
    exponential = graph.op("Exp", graph.op("Mul", away, operand))
    return exponential, graph.op("Add", exponential, graph.scalar(1, operand.dtype)), away


@lowers(aten.soft_margin_loss.default)
def soft_margin_loss(graph: OnnxGraph, operand: Operand, target: Operand, reduction: int = MEAN) -> Any:
    _, above_one, _ = _exponential(graph, operand, target)
    return reduced(graph, graph.op("Log", above_one), _broadcast(operand, target), reduction)


@lowers(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    graph: OnnxGraph, grad: Operand, operand: Operand, target: Operand, reduction: int
) -> Any:
    exponential, above_one, away = _exponential(graph, operand, target)
    slope = graph.op("Div", graph.op("Mul", away, exponential), above_one)
    return graph.op("Mul", slope, share_of(graph, grad, _broadcast(operand, target), reduction))
