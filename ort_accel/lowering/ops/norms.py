"""Layer, group and root-mean-square norms, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.kernels.rms_norm import own
from ort_accel.lowering.kernel_bugs import layer_norm_is_exact
from ort_accel.lowering.onnx_graph import MICROSOFT, Input, NotLowerable, OnnxGraph, Operand, Value
from ort_accel.lowering.ops.elementwise import root_of
from ort_accel.lowering.ops.reductions import not_empty
from ort_accel.lowering.registry import lowers
from ort_accel.lowering.single_precision import in_single_precision
from ort_accel.lowering.term import Result, Term, term
from ort_accel.runtime.installed_ort import kernel_refusal

aten = torch.ops.aten


def one_dtype(*operands: Operand | None) -> torch.dtype:
    """Return the type of all operands; refuse mixed types."""
    dtypes = {operand.dtype for operand in operands if operand is not None}
    if len(dtypes) > 1:
        raise NotLowerable(f"a normalization in {' and '.join(sorted(map(str, dtypes)))}")
    return dtypes.pop()


def mean_over(x: Term, axes: Sequence[int]) -> Term:
    """Return the mean over some dimensions, which stay with size 1."""
    return x.op("ReduceMean", x.graph.ints(axes), keepdims=1)


def sum_over(x: Term, axes: Sequence[int]) -> Term:
    """Return the sum over some dimensions."""
    return x.op("ReduceSum", x.graph.ints(axes), keepdims=0) if axes else x


def inverse_root(variance: Term, epsilon: float) -> Term:
    """Return 1 / sqrt(variance + epsilon)."""
    return root_of(variance + epsilon).op("Reciprocal")


def standardized(x: Term, axes: Sequence[int], epsilon: float) -> tuple[Term, Term, Term]:
    """Return the value with mean 0 and variance 1 over some dimensions, the mean, and one over the deviation."""
    mean = mean_over(x, axes)
    centered = x - mean
    inverse = inverse_root(mean_over(centered * centered, axes), epsilon)
    return centered * inverse, mean, inverse


def standardized_gradient(grad: Term, normal: Term, inverse: Term, axes: Sequence[int]) -> Term:
    """Return the gradient of `standardized`, from that of its first result."""
    return (grad - mean_over(grad, axes) - normal * mean_over(grad * normal, axes)) * inverse


def _unit_scale(graph: OnnxGraph, shape: Sequence[Size], dtype: torch.dtype) -> Value:
    return graph.op("Expand", graph.scalar(1, dtype), graph.sizes(shape))


@lowers(aten.native_layer_norm.default)
def layer_norm(
    graph: OnnxGraph,
    operand: Operand,
    shape: Sequence[Size],
    weight: Operand | None,
    bias: Operand | None,
    epsilon: float,
) -> tuple[Result | None, ...]:
    dtype = one_dtype(operand, weight, bias)
    if graph.result[1].dtype != torch.float32:
        return _exact_layer_norm(graph, operand, shape, weight, bias, epsilon)
    scale = weight if weight is not None else _unit_scale(graph, shape, dtype)
    how: dict[str, Any] = {"axis": -len(shape), "epsilon": float(epsilon), "stash_type": 1}
    if dtype != torch.float32 or layer_norm_is_exact():
        return graph.op_with_outputs("LayerNormalization", 3, operand, scale, bias, **how)
    x = term(graph, operand)
    mean = mean_over(x, _last_axes(operand, shape))
    value, _, inverse = graph.op_with_outputs("LayerNormalization", 3, x - mean, scale, bias, **how)
    return value, mean, inverse


@in_single_precision
def _exact_layer_norm(
    graph: OnnxGraph,
    operand: Operand,
    shape: Sequence[Size],
    weight: Operand | None,
    bias: Operand | None,
    epsilon: float,
) -> tuple[Result | None, ...]:
    """Write the formula in float64, where the kernel returns its statistics in single precision."""
    value, mean, inverse = standardized(term(graph, operand), _last_axes(operand, shape), epsilon)
    if weight is not None:
        value = value * weight
    return value if bias is None else value + bias, mean, inverse


def _has_layer_norm_gradient() -> bool:
    """True if ONNX Runtime has the kernel, which wants at least two rows."""
    return kernel_refusal("com.microsoft.LayerNormalizationGrad") is None


@lowers(aten.native_layer_norm_backward.default)
@in_single_precision
def layer_norm_backward(
    graph: OnnxGraph,
    grad: Operand,
    operand: Operand,
    shape: Sequence[Size],
    mean: Operand,
    inverse: Operand,
    weight: Operand | None,
    bias: Operand | None,
    wanted: Sequence[bool],
) -> tuple[Result | None, ...]:
    dtype = one_dtype(grad, operand, mean, inverse, weight)
    outer, inner = list(range(operand.ndim - len(shape))), _last_axes(operand, shape)
    one_row = all(isinstance(operand.shape[dim], int) and operand.shape[dim] == 1 for dim in outer)
    if weight is not None and dtype == torch.float32 and not one_row and _has_layer_norm_gradient():
        outputs: tuple[Result | None, ...] = graph.op_with_outputs(
            "LayerNormalizationGrad",
            3,
            *(grad, operand, weight, mean, inverse),
            domain=MICROSOFT,
            axis=-len(shape),
        )
    else:
        given, one_over_deviation = term(graph, grad), term(graph, inverse)
        normal = (term(graph, operand) - mean) * one_over_deviation
        scaled = given if weight is None else given * weight
        outputs = (
            standardized_gradient(scaled, normal, one_over_deviation, inner) if wanted[0] else None,
            sum_over(given * normal, outer) if wanted[1] else None,
            sum_over(given, outer) if wanted[2] else None,
        )
    return tuple(output if want else None for output, want in zip(outputs, wanted, strict=True))


@lowers(aten._fused_rms_norm.default)
@in_single_precision
def rms_norm(
    graph: OnnxGraph, operand: Operand, shape: Sequence[Size], weight: Operand | None, epsilon: float | None
) -> tuple[Result | None, ...]:
    x, dtype = term(graph, operand), one_dtype(operand, weight)
    square = mean_over(x * x, _last_axes(operand, shape))
    inverse = inverse_root(square, torch.finfo(dtype).eps if epsilon is None else epsilon)
    normal = x * inverse
    return normal if weight is None else normal * weight, inverse


@lowers(own.rms_norm.default)
def rms_norm_of_rows(
    graph: OnnxGraph, operand: Operand, weight: Operand | None, epsilon: float
) -> tuple[Result | None, ...]:
    return rms_norm(graph, operand, operand.shape[-1:], weight, epsilon)


@lowers(own.rms_norm_backward.default)
def rms_norm_of_rows_backward(
    graph: OnnxGraph, grad: Operand, operand: Operand, weight: Operand | None, inverse: Operand, wanted: bool
) -> tuple[Result | None, ...]:
    if not wanted:
        raise NotLowerable("a result without elements")
    return rms_norm_backward(graph, grad, operand, operand.shape[-1:], inverse, weight, [True, True])


@lowers(aten._fused_rms_norm_backward.default)
@in_single_precision
def rms_norm_backward(
    graph: OnnxGraph,
    grad: Operand,
    operand: Operand,
    shape: Sequence[Size],
    inverse: Operand,
    weight: Operand | None,
    wanted: Sequence[bool],
) -> tuple[Result | None, ...]:
    one_dtype(grad, operand, inverse, weight)
    given, normal = term(graph, grad), term(graph, operand) * inverse
    scaled = given if weight is None else given * weight
    along = normal * mean_over(scaled * normal, _last_axes(operand, shape))
    outer = list(range(operand.ndim - len(shape)))
    return (scaled - along) * inverse if wanted[0] else None, sum_over(given * normal, outer) if wanted[1] else None


def by_channel(graph: OnnxGraph, value: Input, ndim: int) -> Value:
    """Return one number a channel in a shape that is broadcast with [batch, channel, ...]."""
    return graph.op("Reshape", value, graph.ints([1, -1] + [1] * (ndim - 2)))


def _last_axes(operand: Operand, shape: Sequence[Size]) -> list[int]:
    """Return the dimensions of a norm over the last ones, of this shape."""
    return list(range(operand.ndim - len(shape), operand.ndim))


@lowers(aten.native_group_norm.default)
@in_single_precision
def group_norm(
    graph: OnnxGraph,
    operand: Operand,
    weight: Operand | None,
    bias: Operand | None,
    batch: Size,
    channels: Size,
    inner: Size,
    groups: int,
    epsilon: float,
) -> tuple[Result | None, ...]:
    not_empty(operand)
    dtype, ndim = one_dtype(operand, weight, bias), operand.ndim
    grouped = graph.op("Reshape", operand, graph.ints([0, groups, -1]))
    normal, mean, inverse = standardized(Term(graph, grouped, dtype), [2], epsilon)
    value = Term(graph, graph.reshape(normal, operand.shape), dtype)
    if weight is not None:
        value = value * by_channel(graph, weight, ndim)
    if bias is not None:
        value = value + by_channel(graph, bias, ndim)
    return value, *(graph.op("Squeeze", item, graph.ints([2])) for item in (mean, inverse))


@lowers(aten.native_group_norm_backward.default)
@in_single_precision
def group_norm_backward(
    graph: OnnxGraph,
    grad: Operand,
    operand: Operand,
    mean: Operand,
    inverse: Operand,
    weight: Operand | None,
    batch: Size,
    channels: Size,
    inner: Size,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Result | None, ...]:
    not_empty(operand)
    one_dtype(grad, operand, mean, inverse, weight)
    by_group, but_channels = graph.ints([0, groups, -1]), [0, *range(2, operand.ndim)]
    means, inverses = (term(graph, item).op("Unsqueeze", graph.ints([2])) for item in (mean, inverse))
    grouped = (term(graph, operand).op("Reshape", by_group) - means) * inverses
    normal, given = graph.reshape(grouped, operand.shape), term(graph, grad)
    scaled = given if weight is None else given * by_channel(graph, weight, operand.ndim)
    to_operand = standardized_gradient(scaled.op("Reshape", by_group), grouped, inverses, [2])
    return (
        graph.reshape(to_operand, operand.shape) if wanted[0] else None,
        sum_over(given * normal, but_channels) if wanted[1] else None,
        sum_over(given, but_channels) if wanted[2] else None,
    )
