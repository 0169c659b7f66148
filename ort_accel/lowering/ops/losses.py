"""Losses and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.kernels.cross_entropy import MEAN, NONE
from ort_accel.lowering.onnx_graph import Input, NotLowerable, OnnxGraph, Operand, Value
from ort_accel.lowering.ops.indexing import without_negatives
from ort_accel.lowering.registry import Lowering, lowers
from ort_accel.lowering.term import Result, Term, exp, log, sign, term

aten = torch.ops.aten


class Labels:
    """The labels of a classification. One that is no class makes ONNX Runtime fail; ignored ones are 0 in `places`."""

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

    def along_classes(self, value: Input) -> Value:
        """Add the dimension of the classes to one number for each label."""
        return self._graph.op("Unsqueeze", value, self._graph.ints([self.axis]))

    def picked(self, scores: Operand) -> Value:
        """Return the score of each label."""
        found = self._graph.op("GatherElements", scores, self.along_classes(self.places), axis=self.axis)
        return self._graph.op("Squeeze", found, self._graph.ints([self.axis]))

    def weights(self, weight: Operand | None) -> Value:
        """Return the weight of each label: zero where it is ignored."""
        if weight is None:
            return self._graph.cast_from(self.valid, torch.bool, self._dtype)
        return self.where_valid(self._graph.op("Gather", weight, self.places, axis=0))

    def where_valid(self, value: Input) -> Value:
        """Return the values, and zero where a label is ignored."""
        return self._graph.op("Where", self.valid, value, self._graph.scalar(0, self._dtype))


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    graph: OnnxGraph, scores: Operand, target: Operand, weight: Operand | None, reduction: int, ignore_index: Size
) -> tuple[Value, Value]:
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
) -> Value:
    labels = Labels(graph, scores, target, ignore_index)
    updates = graph.op("Neg", label_gradients(graph, labels, grad, weight, reduction, total_weight))
    zeros = graph.op("Expand", graph.scalar(0, scores.dtype), graph.sizes(scores.shape))
    places = labels.along_classes(labels.places)
    return graph.op("ScatterElements", zeros, places, labels.along_classes(updates), axis=labels.axis)


def label_gradients(
    graph: OnnxGraph, labels: Labels, grad: Operand, weight: Operand | None, reduction: int, total_weight: Operand
) -> Value:
    """Return the part of the loss's gradient that each label gets: zero where it is ignored."""
    share = grad.value
    if reduction == MEAN:
        share = graph.op("Div", share, total_weight)
    if weight is not None:
        share = graph.op("Mul", share, labels.weights(weight))
    return labels.where_valid(share)


def reduced(losses: Term, shape: Sequence[Size], reduction: int) -> Term:
    """Return the losses of single elements, their mean or their sum."""
    if reduction == NONE:
        return losses
    if any(size == 0 for size in shape if isinstance(size, int)):
        raise NotLowerable("a loss of nothing")
    return losses.op("ReduceMean" if reduction == MEAN else "ReduceSum", keepdims=0)


def share_of(graph: OnnxGraph, grad: Operand, shape: Sequence[Size], reduction: int) -> Term:
    """Return the part of a loss's gradient that each element gets."""
    share = term(graph, grad)
    return share / math.prod(shape) if reduction == MEAN else share


def _broadcast(operand: Operand, target: Operand) -> torch.Size:
    return torch.broadcast_tensors(operand.fake, target.fake)[0].shape  # type: ignore[no-untyped-call,no-any-return]


Elementwise = Callable[[Term, float], Term]
"""A function of the difference between output and target, or its slope; the last argument is beta or delta."""


def _difference_loss(element: Elementwise) -> Lowering:
    def lowering(
        graph: OnnxGraph, operand: Operand, target: Operand, reduction: int = MEAN, parameter: float = 1.0
    ) -> Result:
        losses = element(term(graph, operand) - target, parameter)
        return reduced(losses, _broadcast(operand, target), reduction)

    return lowering


def _difference_loss_backward(slope: Elementwise) -> Lowering:
    def lowering(
        graph: OnnxGraph, grad: Operand, operand: Operand, target: Operand, reduction: int, parameter: float = 1.0
    ) -> Result:
        slopes = slope(term(graph, operand) - target, parameter)
        return slopes * share_of(graph, grad, _broadcast(operand, target), reduction)

    return lowering


def _square(difference: Term, _: float) -> Term:
    return difference * difference


def _square_slope(difference: Term, _: float) -> Term:
    return difference * 2


def _smooth(difference: Term, beta: float) -> Term:
    """Return a parabola near zero, which becomes a line at `beta`."""
    distance = abs(difference)
    if beta == 0:
        return distance
    return (distance * distance * (0.5 / beta)).where(distance < beta, distance - 0.5 * beta)


def _smooth_slope(difference: Term, beta: float) -> Term:
    if beta == 0:
        return sign(difference)
    return (difference / beta).where(abs(difference) < beta, sign(difference))


def _huber(difference: Term, delta: float) -> Term:
    return _smooth(difference, delta) * delta


def _huber_slope(difference: Term, delta: float) -> Term:
    return _smooth_slope(difference, delta) * delta


for name, (element, slope) in {
    "mse_loss": (_square, _square_slope),
    "smooth_l1_loss": (_smooth, _smooth_slope),
    "huber_loss": (_huber, _huber_slope),
}.items():
    lowers(getattr(aten, name).default)(_difference_loss(element))
    lowers(getattr(aten, f"{name}_backward").default)(_difference_loss_backward(slope))


def _weighted(value: Term, weight: Operand | None) -> Term:
    return value if weight is None else value * weight


@lowers(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    graph: OnnxGraph,
    logits: Operand,
    target: Operand,
    weight: Operand | None = None,
    positive_weight: Operand | None = None,
    reduction: int = MEAN,
) -> Result:
    x, y = term(graph, logits), term(graph, target)
    positive = (-x).op("Softplus")  # -log(sigmoid(logits))
    if positive_weight is not None:
        positive = positive * ((term(graph, positive_weight) - 1) * y + 1)
    return reduced(_weighted((1 - y) * x + positive, weight), logits.shape, reduction)


@lowers(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    graph: OnnxGraph,
    grad: Operand,
    operand: Operand,
    target: Operand,
    weight: Operand | None = None,
    reduction: int = MEAN,
) -> Result:
    x = term(graph, operand)
    slope = (x - target) / ((1 - x) * x).op("Max", 1e-12)
    return _weighted(slope, weight) * share_of(graph, grad, operand.shape, reduction)


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(graph: OnnxGraph, *args: object) -> Value:
    raise NotLowerable("PyTorch checks that all probabilities lie between zero and one")


def _exponential(graph: OnnxGraph, operand: Operand, target: Operand) -> tuple[Term, Term]:
    """Return -target and exp(-target * operand), which overflows as in eager mode."""
    if operand.dtype == torch.float16:
        raise NotLowerable("it overflows in float16, where ONNX Runtime computes in single precision on a CPU")
    negative = -term(graph, target)
    return negative, exp(negative * operand)


@lowers(aten.soft_margin_loss.default)
def soft_margin_loss(graph: OnnxGraph, operand: Operand, target: Operand, reduction: int = MEAN) -> Result:
    _, power = _exponential(graph, operand, target)
    return reduced(log(power + 1), _broadcast(operand, target), reduction)


@lowers(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    graph: OnnxGraph, grad: Operand, operand: Operand, target: Operand, reduction: int
) -> Result:
    negative, power = _exponential(graph, operand, target)
    slope = negative * power / (power + 1)
    return slope * share_of(graph, grad, _broadcast(operand, target), reduction)
