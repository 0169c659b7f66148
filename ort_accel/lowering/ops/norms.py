"""Normalization by layer, by group and by root of mean square, and the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.lowering.kernel_bugs import layer_norm_is_exact
from ort_accel.lowering.onnx_graph import MICROSOFT, NotLowerable, OnnxGraph, Operand
from ort_accel.lowering.ops.elementwise import root_of
from ort_accel.lowering.ops.reductions import not_empty
from ort_accel.lowering.registry import lowers
from ort_accel.runtime.installed_ort import kernel_refusal

aten = torch.ops.aten


def one_dtype(*operands: Operand | None) -> torch.dtype:
    """The type of all operands; mixed ones are refused."""
    dtypes = {operand.dtype for operand in operands if operand is not None}
    if len(dtypes) > 1:
        raise NotLowerable(f"a normalization in {' and '.join(sorted(map(str, dtypes)))}")
    return dtypes.pop()


def mean_over(graph: OnnxGraph, value: Any, axes: Sequence[int]) -> Any:
    """The mean over some dimensions, which stay with size 1."""
    return graph.op("ReduceMean", value, graph.ints(axes), keepdims=1)


def sum_over(graph: OnnxGraph, value: Any, axes: Sequence[int], keepdims: int = 0) -> Any:
    """The sum over some dimensions."""
    return graph.op("ReduceSum", value, graph.ints(axes), keepdims=keepdims) if axes else value


def inverse_root(graph: OnnxGraph, variance: Any, epsilon: float, dtype: torch.dtype) -> Any:
    """1 / sqrt(variance + epsilon)"""
    return graph.op("Reciprocal", root_of(graph, graph.op("Add", variance, graph.scalar(epsilon, dtype)), dtype))


def standardized(graph: OnnxGraph, value: Any, axes: Sequence[int], epsilon: float, dtype: torch.dtype) -> Any:
    """The value with mean 0 and variance 1 over some dimensions; the mean; one over the deviation."""
    mean = mean_over(graph, value, axes)
    centered = graph.op("Sub", value, mean)
    inverse = inverse_root(graph, mean_over(graph, graph.op("Mul", centered, centered), axes), epsilon, dtype)
    return graph.op("Mul", centered, inverse), mean, inverse


def standardized_gradient(graph: OnnxGraph, grad: Any, normal: Any, inverse: Any, axes: Sequence[int]) -> Any:
    """The gradient of what was standardized, from that of the standardized values."""
    along = graph.op("Mul", normal, mean_over(graph, graph.op("Mul", grad, normal), axes))
    rest = graph.op("Sub", graph.op("Sub", grad, mean_over(graph, grad, axes)), along)
    return graph.op("Mul", rest, inverse)


def _unit_scale(graph: OnnxGraph, shape: Sequence[Size], dtype: torch.dtype) -> Any:
    return graph.op("Expand", graph.scalar(1, dtype), graph.sizes(shape))


@lowers(aten.native_layer_norm.default)
def layer_norm(
    graph: OnnxGraph, operand: Operand, shape: Sequence[Size], weight: Any, bias: Any, epsilon: float
) -> Any:
    dtype = one_dtype(operand, weight, bias)
    if graph.result[1].dtype != torch.float32:
        return _exact_layer_norm(graph, operand, shape, weight, bias, epsilon)
    scale = weight if weight is not None else _unit_scale(graph, shape, dtype)
    how: dict[str, Any] = {"outputs": 3, "axis": -len(shape), "epsilon": float(epsilon), "stash_type": 1}
    if dtype != torch.float32 or layer_norm_is_exact():
        return graph.op("LayerNormalization", operand, scale, bias, **how)
    mean = mean_over(graph, operand, list(range(operand.ndim - len(shape), operand.ndim)))
    value, _, inverse = graph.op("LayerNormalization", graph.op("Sub", operand, mean), scale, bias, **how)
    return value, mean, inverse


def _exact_layer_norm(
    graph: OnnxGraph, operand: Operand, shape: Sequence[Size], weight: Any, bias: Any, epsilon: float
) -> Any:
    """In float64, where the kernel gives its statistics in single precision."""
    axes = list(range(operand.ndim - len(shape), operand.ndim))
    value, mean, inverse = standardized(graph, operand, axes, epsilon, operand.dtype)
    if weight is not None:
        value = graph.op("Mul", value, weight)
    return graph.op("Add", value, bias) if bias is not None else value, mean, inverse


def _has_layer_norm_gradient() -> bool:
    """Whether there is a kernel; it wants at least two rows."""
    return kernel_refusal("com.microsoft.LayerNormalizationGrad") is None


@lowers(aten.native_layer_norm_backward.default)
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
) -> Any:
    dtype = one_dtype(grad, operand, mean, inverse, weight)
    outer, inner = list(range(operand.ndim - len(shape))), list(range(operand.ndim - len(shape), operand.ndim))
    one_row = all(isinstance(operand.shape[dim], int) and operand.shape[dim] == 1 for dim in outer)
    if weight is not None and dtype == torch.float32 and not one_row and _has_layer_norm_gradient():
        outputs = graph.op(
            "LayerNormalizationGrad",
            *(grad, operand, weight, mean, inverse),
            outputs=3,
            domain=MICROSOFT,
            axis=-len(shape),
        )
    else:
        normal = graph.op("Mul", graph.op("Sub", operand, mean), inverse)
        scaled = grad.value if weight is None else graph.op("Mul", grad, weight)
        outputs = (
            standardized_gradient(graph, scaled, normal, inverse, inner) if wanted[0] else None,
            sum_over(graph, graph.op("Mul", grad, normal), outer) if wanted[1] else None,
            sum_over(graph, grad.value, outer) if wanted[2] else None,
        )
    return tuple(output if want else None for output, want in zip(outputs, wanted, strict=True))


@lowers(aten._fused_rms_norm.default)
def rms_norm(
    graph: OnnxGraph, operand: Operand, shape: Sequence[Size], weight: Operand | None, epsilon: float | None
) -> Any:
    dtype = one_dtype(operand, weight)
    axes = list(range(operand.ndim - len(shape), operand.ndim))
    square = mean_over(graph, graph.op("Mul", operand, operand), axes)
    inverse = inverse_root(graph, square, torch.finfo(dtype).eps if epsilon is None else epsilon, dtype)
    normal = graph.op("Mul", operand, inverse)
    return normal if weight is None else graph.op("Mul", normal, weight), inverse


@lowers(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    graph: OnnxGraph,
    grad: Operand,
    operand: Operand,
    shape: Sequence[Size],
    inverse: Operand,
    weight: Operand | None,
    wanted: Sequence[bool],
) -> Any:
    one_dtype(grad, operand, inverse, weight)
    outer, inner = list(range(operand.ndim - len(shape))), list(range(operand.ndim - len(shape), operand.ndim))
    normal = graph.op("Mul", operand, inverse)
    scaled = grad.value if weight is None else graph.op("Mul", grad, weight)
    along = graph.op("Mul", normal, mean_over(graph, graph.op("Mul", scaled, normal), inner))
    to_operand = graph.op("Mul", graph.op("Sub", scaled, along), inverse) if wanted[0] else None
    return to_operand, sum_over(graph, graph.op("Mul", grad, normal), outer) if wanted[1] else None


def _by_channel(graph: OnnxGraph, value: Any, ndim: int) -> Any:
    """One number a channel, to be multiplied with [batch, channel, ...]."""
    return graph.op("Reshape", value, graph.ints([1, -1] + [1] * (ndim - 2)))


@lowers(aten.native_group_norm.default)
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
) -> Any:
    not_empty(operand)
    dtype, ndim = one_dtype(operand, weight, bias), operand.ndim
    grouped = graph.op("Reshape", operand, graph.ints([0, groups, -1]))
    normal, mean, inverse = standardized(graph, grouped, [2], epsilon, dtype)
    value = graph.reshape(normal, operand.shape)
    if weight is not None:
        value = graph.op("Mul", value, _by_channel(graph, weight, ndim))
    if bias is not None:
        value = graph.op("Add", value, _by_channel(graph, bias, ndim))
    return value, *(graph.op("Squeeze", item, graph.ints([2])) for item in (mean, inverse))


@lowers(aten.native_group_norm_backward.default)
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
) -> Any:
    not_empty(operand)
    one_dtype(grad, operand, mean, inverse, weight)
    by_group, by_channel = graph.ints([0, groups, -1]), [0, *range(2, operand.ndim)]
    means, inverses = (graph.op("Unsqueeze", item, graph.ints([2])) for item in (mean, inverse))
    grouped = graph.op("Mul", graph.op("Sub", graph.op("Reshape", operand, by_group), means), inverses)
    normal = graph.reshape(grouped, operand.shape)
    scaled = grad.value if weight is None else graph.op("Mul", grad, _by_channel(graph, weight, operand.ndim))
    to_operand = standardized_gradient(graph, graph.op("Reshape", scaled, by_group), grouped, inverses, [2])
    return (
        graph.reshape(to_operand, operand.shape) if wanted[0] else None,
        sum_over(graph, graph.op("Mul", grad, normal), by_channel) if wanted[1] else None,
        sum_over(graph, grad.value, by_channel) if wanted[2] else None,
    )
