"""Writes the program of a call: its outputs and arguments as integers, which the native library reads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from ort_accel.graph.memory_layout import permuted_order, reverse
from ort_accel.graph.symbolic_sizes import Size, expression
from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph

NONE, INTEGER, REAL, TRUTH, TENSOR, LIST, OPTIONAL, CODE, DEVICE, TEXT, OUTPUT, NUMBER, FRAMED = range(13)
"""The kinds of arguments in a program, as `native/operators/program.h` reads them."""

DTYPE_CODES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}
"""PyTorch's own numbers of the types, which its C interface keeps."""

FORMAT_CODES = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}

ANY_INDEX = 0xFFFFFFFF
"""The index of a device that is given without one."""

STRIDED_LAYOUT = 0


@dataclass(frozen=True)
class Strided:
    """A tensor as a view of a value in the model: the memory of `base`, and the sizes and strides of `fake` in it."""

    base: ir.Value
    fake: torch.Tensor
    memory: torch.Tensor | None = None
    """The layout of all the memory, if it belongs to the model, so that it may be given out as a result."""
    frame_position: int | None = None
    """The position in the frame, if `base` is the frame; `fake` then has the strides in that tensor."""
    origin: Size = 0
    """The offset of the tensor in its storage."""


def whole(base: ir.Value, layout: torch.Tensor) -> Strided:
    """Returns a view of all the memory of a value that the model computes."""
    return Strided(base, layout, layout)


class ResultBuffer:
    """The argument that an operator writes its result into."""


class ProgramWriter:
    """Collects the inputs of one call, and writes its arguments."""

    def __init__(self, graph: OnnxGraph, strided: Callable[[fx.Node], Strided]) -> None:
        """`strided` returns the tensor of a node as a view."""
        self._graph, self._strided = graph, strided
        self.inputs: list[ir.Value] = [graph.size_table]
        self.texts: list[str] = []
        self.framed: set[int] = set()

    def argument(self, kind: Any, value: Any) -> list[int]:
        """Returns an argument of this type."""
        if isinstance(value, ResultBuffer):
            return [OUTPUT, 0]
        if kind.kind() == "OptionalType":
            return [NONE] if value is None else [OPTIONAL, 1, *self.argument(kind.getElementType(), value)]
        if kind.kind() == "ListType":
            items = value if isinstance(value, tuple | list) else [value]
            return [LIST, len(items), *joined([self.argument(kind.getElementType(), item) for item in items])]
        known = value.meta["val"] if isinstance(value, fx.Node) else value
        if kind.kind() == "TensorType":
            return self.tensor(self._strided(value)) if isinstance(known, torch.Tensor) else _number(known)
        return self._plain(kind.kind(), known)

    def _plain(self, kind: str, value: Any) -> list[int]:
        """Returns an argument that is no tensor."""
        match value:
            case torch.dtype():
                return [CODE, DTYPE_CODES[value]]
            case torch.memory_format():
                return [CODE, FORMAT_CODES[value]]
            case torch.layout():
                return [CODE, STRIDED_LAYOUT]
            case torch.device():
                return [DEVICE, ANY_INDEX if value.index is None else value.index]
            case str():
                self.texts.append(value)
                return [TEXT, len(self.texts) - 1]
            case bool() if kind != "FloatType":
                return [TRUTH, int(value)]
            case int() | torch.SymInt() if kind != "FloatType":
                return [INTEGER, *self.size(value)]
            case int() | float():
                return [REAL, _bits(float(value))]
        raise NotLowerable(f"an argument of type {type(value).__name__}")

    def number(self, value: Size | float | None) -> list[int]:
        """Returns an argument of a kernel that is no tensor; None is an address of nothing."""
        if value is None:
            return [NONE]
        return [REAL, _bits(value)] if isinstance(value, float) else [INTEGER, *self.size(value)]

    def tensor(self, tensor: Strided) -> list[int]:
        """Returns a tensor."""
        if tensor.base not in self.inputs:
            self.inputs.append(tensor.base)
        if tensor.frame_position is not None:
            self.framed.add(tensor.frame_position)
            head = [FRAMED, tensor.frame_position]
        else:
            head = [TENSOR, self.inputs.index(tensor.base)]
        return [*head, DTYPE_CODES[tensor.fake.dtype], *self.layout(tensor.fake, tensor.origin)]

    def result(self, fake: torch.Tensor) -> list[int]:
        """Returns an output of the call, as PyTorch sees it and as ONNX Runtime does."""
        dims = in_memory_order(fake).shape
        return [DTYPE_CODES[fake.dtype], *self.layout(fake), len(dims), *self._sizes(dims)]

    def layout(self, fake: torch.Tensor, origin: Size = 0) -> list[int]:
        """Returns the sizes and strides of a tensor, and where it begins."""
        offset = self.size(fake.storage_offset() - origin)
        return [fake.ndim, *self._sizes(fake.shape), *self._sizes(fake.stride()), *offset]

    def size(self, size: Size) -> list[int]:
        """Returns a fixed number, or a position in the table of sizes."""
        found = expression(size)
        return [0, found] if isinstance(found, int) else [1, self._graph.size_position(found)]

    def _sizes(self, sizes: Sequence[Size]) -> list[int]:
        return joined([self.size(size) for size in sizes])


def joined(parts: Sequence[Sequence[int]]) -> list[int]:
    """Returns the parts of a program as one list."""
    return [number for part in parts for number in part]


def in_memory_order(fake: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with its dimensions in the order of memory."""
    order = permuted_order(fake)
    return fake if order is None else fake.permute(order)


def dense(fake: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same type and sizes without gaps, in the same order of dimensions where that is clear."""
    order = permuted_order(fake)
    if order is None:
        return fake.new_empty(fake.shape)
    return fake.new_empty([fake.shape[dim] for dim in order]).permute(reverse(order))


def _number(value: object) -> list[int]:
    """Returns a number as a tensor without dimensions, which does not change the type of the result."""
    match value:
        case bool():
            return [NUMBER, DTYPE_CODES[torch.bool], int(value)]
        case int():
            return [NUMBER, DTYPE_CODES[torch.int64], value]
        case float():
            return [NUMBER, DTYPE_CODES[torch.float64], _bits(value)]
    raise NotLowerable(f"a {type(value).__name__} in place of a tensor")


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
