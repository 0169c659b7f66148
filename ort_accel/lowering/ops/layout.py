"""Views, copies, casts, splits and concatenations: operators that compute nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ort_accel.graph.symbolic_sizes import Size, expression, same_shape
from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand, Value, axis
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten

MAX_INDEX = 2**63 - 1


@lowers(
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.alias_copy.default,
    aten.lift_fresh_copy.default,
)
def identity(graph: OnnxGraph, operand: Operand, **options: object) -> Value:
    return operand.value


@lowers(
    aten.view.default,
    aten.view_copy.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.unsqueeze_copy.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
    aten.view_as.default,
)
def view(graph: OnnxGraph, operand: Operand, *args: object) -> Value:
    if same_shape(operand.shape, graph.result.shape):
        return operand.value
    return graph.reshape(operand, graph.result.shape)


@lowers(aten.permute.default, aten.permute_copy.default)
def permute(graph: OnnxGraph, operand: Operand, dims: Sequence[int]) -> Value:
    order = [axis(dim, operand.ndim) for dim in dims]
    return operand.value if order == sorted(order) else graph.op("Transpose", operand, perm=order)


@lowers(aten.transpose.int, aten.transpose_copy.int)
def transpose(graph: OnnxGraph, operand: Operand, one: int, other: int) -> Value:
    order = list(range(operand.ndim))
    if order:
        one, other = axis(one, operand.ndim), axis(other, operand.ndim)
        order[one], order[other] = other, one
    return permute(graph, operand, order)


@lowers(aten.t.default, aten.t_copy.default)
def t(graph: OnnxGraph, operand: Operand) -> Value:
    return permute(graph, operand, list(range(operand.ndim))[::-1])


@lowers(aten.expand.default, aten.expand_copy.default)
def expand(graph: OnnxGraph, operand: Operand, sizes: Sequence[Size], implicit: bool = False) -> Value:
    if same_shape(operand.shape, graph.result.shape):
        return operand.value
    is_empty = 0 in map(expression, graph.result.shape)  # then ONNX Runtime's optimizer drops the `Expand` of a tensor
    value = graph.scalar(0, operand.dtype) if is_empty else operand.value
    return graph.op("Expand", value, graph.sizes(graph.result.shape))


@lowers(aten.copy.default)
def copy(graph: OnnxGraph, operand: Operand, source: Operand, non_blocking: bool = False) -> Value:
    value = graph.cast(source, operand.dtype)
    if same_shape(source.shape, graph.result.shape):
        return value
    return graph.op("Expand", value, graph.sizes(graph.result.shape))


@lowers(aten.repeat.default)
def repeat(graph: OnnxGraph, operand: Operand, repeats: Sequence[Size]) -> Value:
    shape = [1] * (len(repeats) - operand.ndim) + list(operand.shape)
    value = operand.value if len(shape) == operand.ndim else graph.reshape(operand, shape)
    return graph.op("Tile", value, graph.sizes(repeats)) if repeats else value


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(
    graph: OnnxGraph, operand: Operand, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1
) -> Value:
    if same_shape(operand.shape, graph.result.shape) and step == 1:
        return operand.value
    bounds = [graph.sizes([0 if start is None else start]), graph.sizes([MAX_INDEX if end is None else end])]
    return graph.op("Slice", operand, *bounds, graph.ints([axis(dim, operand.ndim)]), graph.ints([step]))


@lowers(aten.narrow_copy.default)
def narrow_copy(graph: OnnxGraph, operand: Operand, dim: int, start: Size, length: Size) -> Value:
    if isinstance(start, int) and start < 0:
        raise NotLowerable("a part whose start is counted from the end")
    return slice_(graph, operand, dim, start, start + length)


@lowers(aten.select.int, aten.select_copy.int)
def select(graph: OnnxGraph, operand: Operand, dim: int, index: Size) -> Value:
    return graph.op("Gather", operand, graph.scalar(index, torch.int64), axis=axis(dim, operand.ndim))


@lowers(aten.cat.default)
def cat(graph: OnnxGraph, operands: Sequence[Operand], dim: int = 0) -> Value:
    parts = [item for item in operands if item.shape != (0,) or graph.result.ndim == 1]
    if len(parts) == 1:
        return graph.cast(parts[0], graph.result.dtype)
    values = [graph.cast(part, graph.result.dtype) for part in parts]
    return graph.op("Concat", *values, axis=axis(dim, graph.result.ndim))


@lowers(aten.stack.default)
def stack(graph: OnnxGraph, operands: Sequence[Operand], dim: int = 0) -> Value:
    dim = axis(dim, graph.result.ndim)
    values = [graph.op("Unsqueeze", graph.cast(part, graph.result.dtype), graph.ints([dim])) for part in operands]
    return values[0] if len(values) == 1 else graph.op("Concat", *values, axis=dim)


@lowers(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.split_copy.Tensor,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
def split(graph: OnnxGraph, operand: Operand, sizes: object, dim: int = 0) -> tuple[Value, ...]:
    dim = axis(dim, operand.ndim)
    lengths = [part.shape[dim] for part in graph.result]
    if len(lengths) == 1:
        return (operand.value,)
    return graph.op_with_outputs("Split", len(lengths), operand, graph.sizes(lengths), axis=dim)


@lowers(aten.unbind.int, aten.unbind_copy.int)
def unbind(graph: OnnxGraph, operand: Operand, dim: int = 0) -> tuple[Value, ...]:
    dim = axis(dim, operand.ndim)
    return tuple(
        graph.op("Gather", operand, graph.scalar(index, torch.int64), axis=dim) for index in range(len(graph.result))
    )


@lowers(aten._to_copy.default)
def to_copy(graph: OnnxGraph, operand: Operand, dtype: torch.dtype | None = None, **options: object) -> Value:
    if operand.fake.device != graph.result.device:
        raise NotLowerable("a move to another device")
    target = graph.result.dtype
    small = target in {torch.int8, torch.uint8, torch.int16}
    if operand.dtype.is_floating_point and small:
        raise NotLowerable("a cast from float to a small integer, whose overflow differs")
    return graph.cast(operand, target)


@lowers(aten.tril.default)
def tril(graph: OnnxGraph, operand: Operand, diagonal: int = 0) -> Value:
    return graph.op("Trilu", operand, graph.scalar(diagonal, torch.int64), upper=0)


@lowers(aten.triu.default)
def triu(graph: OnnxGraph, operand: Operand, diagonal: int = 0) -> Value:
    return graph.op("Trilu", operand, graph.scalar(diagonal, torch.int64), upper=1)


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(graph: OnnxGraph, operand: Operand, offset: int = 0, one: int = 0, other: int = 1) -> Value:
    """Flatten the rows, and take every (width + 1)th element."""
    ndim = operand.ndim
    row, column = axis(one, ndim), axis(other, ndim)
    rest = [dim for dim in range(ndim) if dim not in {row, column}]
    flat = graph.reshape(
        permute(graph, operand, [*rest, row, column]),
        [*(operand.shape[dim] for dim in rest), operand.shape[row] * operand.shape[column]],
    )
    width, length = operand.shape[column], graph.result.shape[-1]
    start = offset if offset >= 0 else -offset * width
    last = graph.ints([len(rest)])
    ends = graph.sizes([start]), graph.sizes([start + (length - 1) * (width + 1) + 1])
    return graph.op("Slice", flat, *ends, last, graph.sizes([width + 1]))


@lowers(aten.pixel_shuffle.default)
def pixel_shuffle(graph: OnnxGraph, operand: Operand, factor: int) -> Value:
    channels, height, width = operand.shape[-3:]
    apart = graph.reshape(operand, [-1, channels // factor**2, factor, factor, height, width])
    return graph.reshape(graph.op("Transpose", apart, perm=[0, 1, 4, 2, 5, 3]), graph.result.shape)


@lowers(aten.pixel_unshuffle.default)
def pixel_unshuffle(graph: OnnxGraph, operand: Operand, factor: int) -> Value:
    channels, height, width = operand.shape[-3:]
    apart = graph.reshape(operand, [-1, channels, height // factor, factor, width // factor, factor])
    return graph.reshape(graph.op("Transpose", apart, perm=[0, 1, 3, 5, 2, 4]), graph.result.shape)
