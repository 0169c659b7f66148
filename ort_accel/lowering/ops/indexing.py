"""Reading and writing at indices of another tensor.

PyTorch raises an error for an index that is out of range, and most of its operators for a negative one, which ONNX
counts from the end. A negative index is moved out of range, so that ONNX Runtime raises an error, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ort_accel.graph.symbolic_sizes import Size, expression
from ort_accel.lowering.onnx_graph import Input, NotLowerable, Number, OnnxGraph, Operand, Slower, Value, axis
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


def without_negatives(graph: OnnxGraph, index: Operand, size: Size) -> Value:
    """Return indices as int64, with negative ones moved behind the end."""
    value = graph.cast(index, torch.int64)
    negative = graph.op("Less", value, graph.scalar(0, torch.int64))
    return graph.op("Where", negative, graph.scalar(size, torch.int64), value)


@lowers(aten.embedding.default)
def embedding(
    graph: OnnxGraph, weight: Operand, ids: Operand, padding: int = -1, scale: bool = False, sparse: bool = False
) -> Value:
    return graph.op("Gather", weight, without_negatives(graph, ids, weight.shape[0]), axis=0)


@lowers(aten.embedding_dense_backward.default)
def embedding_backward(graph: OnnxGraph, *args: object) -> Value:
    raise Slower(
        "com.microsoft.GatherGrad adds in any order, so that two runs differ, and took 7.7 ms for 1,024 rows of a "
        "512 x 384 table where PyTorch took 0.2 ms"
    )


@lowers(aten.index_select.default)
def index_select(graph: OnnxGraph, operand: Operand, dim: int, index: Operand) -> Value:
    if operand.ndim == 0:
        raise NotLowerable("a selection from a single number")
    dim = axis(dim, operand.ndim)
    places = without_negatives(graph, index, operand.shape[dim])
    if index.ndim == 0:
        places = graph.op("Unsqueeze", places, graph.ints([0]))
    return graph.op("Gather", operand, places, axis=dim)


@lowers(aten.take.default)
def take(graph: OnnxGraph, operand: Operand, index: Operand) -> Value:
    return graph.op("Gather", graph.op("Reshape", operand, graph.ints([-1])), index, axis=0)


@lowers(aten.gather.default)
def gather(graph: OnnxGraph, operand: Operand, dim: int, index: Operand, sparse_grad: bool = False) -> Value:
    if operand.ndim == 0 or index.ndim == 0:
        raise NotLowerable("a single number as a list of numbers")
    dim = axis(dim, operand.ndim)
    return graph.op("GatherElements", operand, without_negatives(graph, index, operand.shape[dim]), axis=dim)


@lowers(aten.scatter.src, aten.scatter.value)
def scatter(graph: OnnxGraph, operand: Operand, dim: int, index: Operand, source: Operand | Number) -> Value:
    if operand.ndim == 0 or index.ndim == 0:
        raise NotLowerable("a single number as a list of numbers")
    dim = axis(dim, operand.ndim)
    places = without_negatives(graph, index, operand.shape[dim])
    if isinstance(source, Operand):
        axes = list(range(index.ndim))
        bounds = [graph.ints([0] * index.ndim), graph.sizes(index.shape), graph.ints(axes)]
        updates = graph.op("Slice", source, *bounds)
    else:
        updates = graph.op("Expand", graph.scalar(source, operand.dtype), graph.sizes(index.shape))
    return graph.op("ScatterElements", operand, places, updates, axis=dim)


@lowers(aten.index_copy.default)
def index_copy(graph: OnnxGraph, operand: Operand, dim: int, index: Operand, source: Operand) -> Value:
    if operand.ndim == 0 or source.ndim == 0:
        raise NotLowerable("a single number as a list of numbers")
    dim = axis(dim, operand.ndim)
    places = without_negatives(graph, index, operand.shape[dim])
    lines = graph.op(
        "Reshape", places, graph.sizes([size if each == dim else 1 for each, size in enumerate(source.shape)])
    )
    return graph.op("ScatterElements", operand, graph.op("Expand", lines, graph.sizes(source.shape)), source, axis=dim)


@lowers(aten.index_add.default)
def index_add(graph: OnnxGraph, *args: object, **kwargs: object) -> Value:
    raise Slower("ScatterElements took 2.7 to 4.3 ms to add 1,024 rows to a 128 x 384 table where PyTorch took 0.1 ms")


class IndexedDims:
    """The indices of `tensor[..., i, j, ...]`: tensors of integers for some dimensions, None for the others."""

    def __init__(self, indices: Sequence[Operand | None], ndim: int) -> None:
        self.dims = [dim for dim, index in enumerate(indices) if index is not None]
        self.tensors = [index for index in indices if index is not None]
        if not self.tensors or any(index.dtype in {torch.bool, torch.uint8} for index in self.tensors):
            raise NotLowerable("an index that is a mask")
        self.ndim = ndim
        self.rank = max(index.ndim for index in self.tensors)
        self.others = [dim for dim in range(ndim) if dim not in self.dims]
        adjacent = self.dims == list(range(self.dims[0], self.dims[-1] + 1))
        self.first = self.dims[0] if adjacent else 0
        """The position of the dimensions of the indices in the result."""

    def to_front(self, graph: OnnxGraph, value: Value) -> Value:
        """Return the tensor with the indexed dimensions first."""
        order = self.dims + self.others
        return value if order == sorted(order) else graph.op("Transpose", value, perm=order)

    def from_front(self, graph: OnnxGraph, value: Value) -> Value:
        """Undo `to_front`."""
        order = self.dims + self.others
        back = [order.index(dim) for dim in range(self.ndim)]
        return value if back == sorted(back) else graph.op("Transpose", value, perm=back)

    def tuples(self, graph: OnnxGraph) -> Value:
        """Return the indices as one tensor of tuples, for GatherND and ScatterND."""
        shape = _broadcast_shape(self.tensors)
        columns = []
        for index in self.tensors:
            value = graph.cast(index, torch.int64)
            if len(self.tensors) > 1:
                value = graph.op("Expand", value, graph.sizes(shape))
            columns.append(graph.op("Unsqueeze", value, graph.ints([-1])))
        return columns[0] if len(columns) == 1 else graph.op("Concat", *columns, axis=-1)


def _broadcast_shape(tensors: Sequence[Operand]) -> list[Size]:
    """Return the shape of tensors that are broadcast together."""
    return list(torch.broadcast_tensors(*(tensor.fake for tensor in tensors))[0].shape)  # type: ignore[no-untyped-call]


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(graph: OnnxGraph, operand: Operand, indices: Sequence[Operand | None]) -> Value:
    places = IndexedDims(indices, operand.ndim)
    if len(places.dims) == 1:
        return graph.op("Gather", operand, graph.cast(places.tensors[0], torch.int64), axis=places.dims[0])
    found = graph.op("GatherND", places.to_front(graph, operand.value), places.tuples(graph))
    front, rest = list(range(places.rank)), list(range(places.rank, graph.result.ndim))
    order = rest[: places.first] + front + rest[places.first :]
    return found if order == sorted(order) else graph.op("Transpose", found, perm=order)


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    graph: OnnxGraph, operand: Operand, indices: Sequence[Operand | None], values: Operand, accumulate: bool = False
) -> Value:
    if accumulate:
        raise NotLowerable("sums at repeated indices, which ONNX Runtime adds up wrongly")
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool:
        return _fill(graph, operand, indices[0], values)
    if torch.are_deterministic_algorithms_enabled():
        raise NotLowerable("which of several values for one place stays is not determined")
    return _written(graph, operand, IndexedDims(indices, operand.ndim), values)


@lowers(aten.index_fill.int_Scalar)
def index_fill(graph: OnnxGraph, operand: Operand, dim: int, index: Operand, number: Any) -> Value:
    if operand.ndim == 0:
        raise NotLowerable("a single number as a list of numbers")
    places = IndexedDims([None] * axis(dim, operand.ndim) + [index], operand.ndim)
    return _written(graph, operand, places, graph.scalar(number, operand.dtype))


def _written(graph: OnnxGraph, operand: Operand, places: IndexedDims, values: Input) -> Value:
    shape = _broadcast_shape(places.tensors)
    kept = [operand.shape[dim] for dim in places.others]
    target = [*kept[: places.first], *shape, *kept[places.first :]]
    updates = graph.op("Expand", values, graph.sizes(target))
    order = [places.first + position for position in range(len(shape))]
    order += [position for position in range(len(target)) if position not in order]
    if order != sorted(order):
        updates = graph.op("Transpose", updates, perm=order)
    written = graph.op("ScatterND", places.to_front(graph, operand.value), places.tuples(graph), updates)
    return places.from_front(graph, written)


def _fill(graph: OnnxGraph, operand: Operand, mask: Operand, values: Operand) -> Value:
    """Write one number where a mask of the first dimensions is true."""
    if any(expression(size) != 1 for size in values.shape):
        raise NotLowerable("an index that is a mask")
    trailing = list(range(mask.ndim, operand.ndim))
    wide = graph.op("Unsqueeze", mask, graph.ints(trailing)) if trailing else mask
    number = graph.op("Reshape", values, graph.ints([])) if values.ndim else values
    return graph.op("Where", wide, number, operand)


@lowers(aten.slice_scatter.default)
def slice_scatter(
    graph: OnnxGraph,
    operand: Operand,
    source: Operand,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Value:
    dim = axis(dim, operand.ndim)
    size, length = operand.shape[dim], source.shape[dim]
    first = _counted_from_front(0 if start is None else start, size)
    if isinstance(first, int) and isinstance(size, int):
        first = max(0, min(first, size))
    if step == 1:
        return _replace(graph, operand, source.value, dim, first, length)
    if not all(isinstance(item, int) for item in (size, length, first)):
        raise NotLowerable("writing with steps into a dimension of changing size")
    origin = list(range(size))
    origin[first : first + length * step : step] = range(size, size + length)
    return graph.op("Gather", graph.op("Concat", operand, source, axis=dim), graph.ints(origin), axis=dim)


@lowers(aten.select_scatter.default)
def select_scatter(graph: OnnxGraph, operand: Operand, source: Operand, dim: int, index: Size) -> Value:
    dim = axis(dim, operand.ndim)
    row = graph.op("Unsqueeze", source, graph.ints([dim]))
    return _replace(graph, operand, row, dim, _counted_from_front(index, operand.shape[dim]), 1)


def _counted_from_front(place: Size, size: Size) -> Size:
    if not isinstance(place, int) or place >= 0:
        return place
    if not isinstance(size, int):
        raise NotLowerable("a place counted from the end of a dimension of changing size")
    return place + size


def _replace(graph: OnnxGraph, operand: Operand, source: Value, dim: int, start: Size, length: Size) -> Value:
    """Replace a part of one dimension."""
    size, end = operand.shape[dim], start + length
    parts = [source]
    if expression(start) != 0:
        parts.insert(0, _part(graph, operand, dim, 0, start))
    if expression(end) != expression(size):
        parts.append(_part(graph, operand, dim, end, size))
    return source if len(parts) == 1 else graph.op("Concat", *parts, axis=dim)


def _part(graph: OnnxGraph, operand: Operand, dim: int, start: Size, end: Size) -> Value:
    return graph.op("Slice", operand, graph.sizes([start]), graph.sizes([end]), graph.ints([dim]))


@lowers(aten.flip.default)
def flip(graph: OnnxGraph, operand: Operand, dims: Sequence[int]) -> Value:
    axes = [axis(dim, operand.ndim) for dim in dims]
    if not axes or operand.ndim == 0:
        return operand.value
    last, before_first, back = ([number] * len(axes) for number in (-1, -(2**63) + 1, -1))
    return graph.op("Slice", operand, *map(graph.ints, (last, before_first, axes, back)))


@lowers(aten.roll.default)
def roll(graph: OnnxGraph, operand: Operand, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if operand.ndim == 0:
        return operand.value
    if not dims:
        flat = graph.op("Reshape", operand, graph.ints([-1]))
        return graph.reshape(_rolled(graph, flat, shifts[0], 0, operand.fake.numel()), operand.shape)
    value = operand.value
    for shift, dim in zip(shifts, dims, strict=True):
        value = _rolled(graph, value, shift, axis(dim, operand.ndim), operand.shape[axis(dim, operand.ndim)])
    return value


def _rolled(graph: OnnxGraph, value: Value, shift: int, dim: int, size: Size) -> Value:
    """Return a dimension with its elements moved on; those beyond one end come back at the other."""
    if isinstance(size, int):
        shift = shift % size if size else 0
    elif not isinstance(shift, int) or abs(shift) > 1:  # a changing size may be smaller than the shift
        raise NotLowerable("a roll by more than one in a dimension of changing size")
    if shift == 0:
        return value
    end = [graph.ints([number]) for number in (-shift, 2**63 - 1, dim)]
    start = [graph.ints([number]) for number in (0, -shift, dim)]
    return graph.op("Concat", graph.op("Slice", value, *end), graph.op("Slice", value, *start), axis=dim)
