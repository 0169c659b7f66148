"""Padding, and the gradients of slices and diagonals, which pad."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ort_accel.graph.symbolic_sizes import Size, expression
from ort_accel.lowering.onnx_graph import NotLowerable, Number, OnnxGraph, Operand, Value, axis
from ort_accel.lowering.ops.creation import diagonal_mask
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


def _padded(graph: OnnxGraph, value: Value, pads: Sequence[tuple[Size, Size]], number: Number = 0) -> Value:
    """Add so many elements in front of and behind each dimension."""
    if all(expression(size) == 0 for pair in pads for size in pair):
        return value
    sizes = [before for before, _ in pads] + [behind for _, behind in pads]
    return graph.op("Pad", value, graph.sizes(sizes), graph.scalar(number, graph.result.dtype))


def _padded_in(graph: OnnxGraph, value: Value, dim: int, before: Size, behind: Size) -> Value:
    pads: list[tuple[Size, Size]] = [(0, 0)] * graph.result.ndim
    pads[dim] = before, behind
    return _padded(graph, value, pads)


@lowers(aten.constant_pad_nd.default)
def constant_pad(graph: OnnxGraph, operand: Operand, pad: Sequence[Size], number: Number = 0) -> Value:
    pairs = [(pad[2 * index], pad[2 * index + 1]) for index in range(len(pad) // 2)]
    pairs += [(0, 0)] * (operand.ndim - len(pairs))
    return _padded(graph, operand.value, pairs[::-1], number)


@lowers(aten.select_backward.default)
def select_backward(graph: OnnxGraph, grad: Operand, sizes: Sequence[Size], dim: int, index: int) -> Value:
    dim = axis(dim, len(sizes))
    before, behind = (index, sizes[dim] - index - 1) if index >= 0 else (sizes[dim] + index, -1 - index)
    return _padded_in(graph, graph.op("Unsqueeze", grad, graph.ints([dim])), dim, before, behind)


@lowers(aten.slice_backward.default)
def slice_backward(
    graph: OnnxGraph, grad: Operand, sizes: Sequence[Size], dim: int, start: Size, end: Size, step: int
) -> Value:
    dim = axis(dim, len(sizes))
    if not isinstance(expression(start), int):
        raise NotLowerable("the gradient of a slice that does not start at a fixed place")
    length, size = grad.shape[dim], sizes[dim]
    before: Size = _place(start, size)
    value = grad.value if step == 1 else _spread(graph, grad, dim, step)
    return _padded_in(graph, value, dim, before, size - before - ((length - 1) * step + 1))


def _place(start: Size, size: Size) -> Size:
    """Return where a slice begins, which may be given from the end, or lie beyond it."""
    if start < 0:
        return torch.sym_max(start + size, 0)  # type: ignore[no-untyped-call,no-any-return]
    return torch.sym_min(start, size)  # type: ignore[no-untyped-call,no-any-return]


def _spread(graph: OnnxGraph, operand: Operand, dim: int, step: int) -> Value:
    """Put zeros between the elements of a dimension."""
    pads = [0] * (2 * operand.ndim + 2)
    pads[operand.ndim + 1 + dim + 1] = step - 1
    apart = graph.op("Unsqueeze", operand, graph.ints([dim + 1]))
    apart = graph.op("Pad", apart, graph.ints(pads), graph.scalar(0, operand.dtype))
    shape = list(operand.shape)
    shape[dim] = shape[dim] * step
    end = graph.sizes([(operand.shape[dim] - 1) * step + 1])
    return graph.op("Slice", graph.reshape(apart, shape), graph.ints([0]), end, graph.ints([dim]))


@lowers(aten.diag_embed.default)
def diag_embed(graph: OnnxGraph, operand: Operand, offset: int = 0, one: int = -2, other: int = -1) -> Value:
    ndim = graph.result.ndim
    if (axis(one, ndim), axis(other, ndim)) != (ndim - 2, ndim - 1):
        raise NotLowerable("a diagonal that is not in the last two dimensions")
    side = graph.result.shape[-1]
    pads: list[tuple[Size, Size]] = [(0, 0)] * operand.ndim
    pads[-1] = max(offset, 0), max(-offset, 0)
    wide = graph.op("Unsqueeze", _padded(graph, operand.value, pads), graph.ints([ndim - 2]))
    mask = diagonal_mask(graph, side, side, offset)
    return graph.op("Where", mask, wide, graph.scalar(0, operand.dtype))
