"""Pooling, and convolutions, which are left to PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand, Slower, Value
from ort_accel.lowering.registry import Lowering, lowers

aten = torch.ops.aten


@lowers(aten.convolution.default)
def convolution(graph: OnnxGraph, operand: Operand, *args: object) -> Value:
    raise Slower(
        "milliseconds in ONNX Runtime and in PyTorch: 15 and 9 for 3x3 kernels, 7 and 4 for 1x1, 27 and 2.5 for a "
        "depthwise 7x7, 10 and 7 for speech, 7 and 6 for patches of a picture"
    )


@lowers(aten.convolution_backward.default)
def convolution_backward(graph: OnnxGraph, *args: object) -> Value:
    raise Slower(
        "milliseconds in com.microsoft.ConvGrad and in PyTorch: 50 and 19 for 3x3 kernels, 18 and 11 for 1x1, 124 and "
        "55 for a depthwise 7x7, 29 and 19 for speech"
    )


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool(graph: OnnxGraph, *args: object) -> Value:
    raise NotLowerable("MaxPool passes over NaN, and with places it takes as long as PyTorch's kernel")


def _average_pool(dims: int) -> Lowering:
    def lowering(
        graph: OnnxGraph,
        operand: Operand,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        if ceil_mode or divisor_override is not None:
            raise NotLowerable("an average over windows that reach beyond the edge, or with another divisor")
        is_single = operand.ndim == dims + 1
        pooled = graph.op(
            "AveragePool",
            graph.op("Unsqueeze", operand, graph.ints([0])) if is_single else operand,
            kernel_shape=_for_each(kernel, dims),
            strides=_for_each(stride or kernel, dims),
            pads=_for_each(padding, dims) * 2,
            count_include_pad=int(count_include_pad),
        )
        return graph.op("Squeeze", pooled, graph.ints([0])) if is_single else pooled

    return lowering


def _for_each(numbers: Sequence[int], dims: int) -> list[int]:
    return list(numbers) if len(numbers) > 1 else list(numbers) * dims


lowers(aten.avg_pool2d.default)(_average_pool(2))
lowers(aten.avg_pool3d.default)(_average_pool(3))


def _windows(sizes: Sequence[Size], counts: Sequence[Size]) -> list[int]:
    """Return the size of the windows, so many along each dimension, that cover a picture without overlap."""
    found = []
    for size, count in zip(sizes, counts, strict=True):
        if not isinstance(size, int) or not isinstance(count, int) or not size or size % count:
            raise NotLowerable("windows of several sizes, or of a size that changes")
        found.append(size // count)
    return found


@lowers(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_average_pool(graph: OnnxGraph, operand: Operand, counts: Sequence[Size]) -> Value:
    dims = len(counts)
    pooled: Value = _average_pool(dims)(graph, operand, _windows(operand.shape[-dims:], counts))
    return pooled


def _adaptive_average_pool_backward(dims: int) -> Lowering:
    def lowering(graph: OnnxGraph, grad: Operand, operand: Operand) -> Value:
        windows = _windows(operand.shape[-dims:], grad.shape[-dims:])
        single, blocks = list(grad.shape[:-dims]), list(grad.shape[:-dims])
        for count, window in zip(grad.shape[-dims:], windows, strict=True):
            single += [count, 1]
            blocks += [count, window]
        share = graph.op("Div", grad, graph.scalar(prod(windows), grad.dtype))
        repeated = graph.op("Expand", graph.reshape(share, single), graph.sizes(blocks))
        return graph.reshape(repeated, operand.shape)

    return lowering


lowers(aten._adaptive_avg_pool2d_backward.default)(_adaptive_average_pool_backward(2))
lowers(aten._adaptive_avg_pool3d_backward.default)(_adaptive_average_pool_backward(3))
