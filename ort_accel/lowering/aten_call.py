"""Writes calls of PyTorch's operators as nodes of a model: the custom operator `AtenCall` of the native library.

ONNX Runtime then runs every operator that PyTorch has, in one session. A call reads its tensors as views of the memory
that they lie in, so that transposes and slices before it cost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch._ops import OpOverload

from ort_accel.graph.memory_layout import is_plain, permuted_order, reverse
from ort_accel.graph.nodes import CHECKS, fakes_in, is_data_dependent, is_getitem, is_watch_call, writes
from ort_accel.graph.symbolic_sizes import Size, expression
from ort_accel.kernels import number_ops
from ort_accel.kernels.host_copies import is_host_copy
from ort_accel.kernels.output_buffers import out_overload
from ort_accel.lowering.onnx_graph import DTYPES, NotLowerable, OnnxGraph, describe

DOMAIN = "ort_accel"
CALL = "AtenCall"

NONE, INTEGER, REAL, TRUTH, TENSOR, LIST, OPTIONAL, CODE, DEVICE, TEXT, OUTPUT, NUMBER, FRAMED = range(13)
"""The kinds of arguments in a program, as `native/operators/aten_call.cc` reads them."""

UNREAD, NO_TENSOR = -1, -2
"""Results of an operator that belong to no output: a tensor that nobody reads, and a number."""

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

aten = torch.ops.aten

TAKES_TENSORS: dict[OpOverload[..., Any], OpOverload[..., Any]] = {
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
    aten.where.ScalarOther: aten.where.self,
    aten.where.ScalarSelf: aten.where.self,
    aten.where.Scalar: aten.where.self,
    aten.remainder.Scalar: aten.remainder.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.bitwise_and.Scalar: aten.bitwise_and.Tensor,
    aten.bitwise_or.Scalar: aten.bitwise_or.Tensor,
}
"""Overloads with a tensor in place of a number of any type, which the C interface cannot pass."""

PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
"""Operators with functions of their own in the C interface, which take numbers."""


class NotCallable(NotLowerable):
    """This node cannot be called through PyTorch's C interface; the text says why."""


@dataclass(frozen=True)
class Strided:
    """A tensor as a view of a value in the model: the memory of `base`, and the sizes and strides of `fake` in it."""

    base: ir.Value
    fake: torch.Tensor
    is_base: bool = False
    """True if the view covers the memory, so that it may be given out as a result."""
    origin: Size = 0
    """Where the tensor in the frame begins in its storage."""
    frame_position: int | None = None
    """The position in the frame, if `base` is the frame; `fake` then has the strides and the offset in a tensor."""


def why_not_callable(node: fx.Node) -> str:
    """Returns why a node cannot be called through PyTorch's C interface; nothing if it can."""
    if not isinstance(node.target, OpOverload) or node.target in CHECKS:
        return "not an operator that returns tensors"
    if writes(node) or is_data_dependent(node) or is_watch_call(node) or is_host_copy(node):
        return "its place among the other nodes is fixed, or its sizes follow from data"
    return _signature_problem(node.target) or _tensor_problem(node)


@cache
def _signature_problem(target: OpOverload[..., Any]) -> str:
    target = TAKES_TENSORS.get(target, target)
    returns = {kind for item in target._schema.returns for kind in _kinds(item.real_type)}
    return "" if returns <= {"TensorType", "IntType", "SymIntType"} else "it returns lists"


def _kinds(kind: Any) -> Iterator[str]:
    """Yields the kind of a type and of those within it."""
    while kind is not None:
        yield kind.kind()
        kind = kind.getElementType() if kind.kind() in ("ListType", "OptionalType") else None


def _tensor_problem(node: fx.Node) -> str:
    for tensor in fakes_in([item.meta.get("val") for item in node.all_input_nodes]) + fakes_in(node.meta["val"]):
        if tensor.dtype not in DTYPES or tensor.device.type != "cpu":
            return f"a tensor of {tensor.dtype} on {tensor.device}"
    return ""


@cache
def _numbers(target: OpOverload[..., Any]) -> list[Any]:
    """Returns the arguments that are numbers of any type."""
    arguments = target._schema.arguments
    return [argument for argument in arguments if "NumberType" in _kinds(argument.real_type)]


def _number_type(value: object) -> str:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int | torch.SymInt) else "float"


class CallWriter:
    """Writes one call into a model."""

    def __init__(self, graph: OnnxGraph, strided: Callable[[fx.Node], Strided]) -> None:
        """`strided` returns the tensor of a node as a view."""
        self._graph, self._strided = graph, strided
        self._inputs: list[ir.Value] = [graph.size_table]
        self._texts: list[str] = []
        self._framed: set[int] = set()
        self._in_product = False

    def call(self, node: fx.Node, after: ir.Value | None = None) -> list[Strided | None]:
        """Writes a node's operator, to run behind the operator that computes `after`. Returns its results."""
        assert isinstance(node.target, OpOverload)
        target, out = self._form(node)
        self._in_product = node.target in PRODUCTS
        fakes = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
        read = _read_results(node, len(fakes))
        wanted = [(at, fake) for at, fake in enumerate(fakes) if at in read and isinstance(fake, torch.Tensor)]
        layouts = [_layout_for(fake) for _, fake in wanted]
        positions = {at: position for position, (at, _) in enumerate(wanted)}
        results = [positions.get(at, UNREAD if _is_tensor(fake) else NO_TENSOR) for at, fake in enumerate(fakes)]
        arguments = [
            self._argument(argument, self._given(node, argument, out)) for argument in target._schema.arguments
        ]
        name, overload = self._name(node, target)
        values = self._node(name, overload, layouts, out is not None, results, arguments, after)
        found: list[Strided | None] = [None] * len(fakes)
        for (at, _), value, layout in zip(wanted, values, layouts, strict=True):
            found[at] = Strided(value, layout, is_base=True)
        return found

    def copy(self, source: Strided, layout: torch.Tensor) -> Strided:
        """Writes a copy of a view into memory of its own, in the order of `layout`."""
        arguments = [self._tensor(source)]
        (value,) = self._node("", "", [layout], True, [], arguments, None)
        return Strided(value, layout, is_base=True)

    def _form(self, node: fx.Node) -> tuple[OpOverload[..., Any], str | None]:
        """Returns the overload to call, and the name of the argument that its result is written into."""
        assert isinstance(node.target, OpOverload)
        target = TAKES_TENSORS.get(node.target, node.target)
        if target not in PRODUCTS and _numbers(target):
            return target, None
        found = out_overload(target)
        return (target, None) if found is None else found

    def _name(self, node: fx.Node, target: OpOverload[..., Any]) -> tuple[str, str]:
        """Returns the name and the overload to call: of a copy of the operator where it takes numbers of any type."""
        if node.target in PRODUCTS or not (numbers := _numbers(target)):
            return target._schema.name, target._schema.overload_name
        values = [self._given(node, argument, None) for argument in numbers]
        name = number_ops.name_of(target, list(map(_number_type, values)))
        number_ops.define(name)
        self._graph.number_ops.add(name)
        return f"{number_ops.NAMESPACE}::{name}", ""

    def _given(self, node: fx.Node, argument: Any, out: str | None) -> Any:
        """Returns the value of an argument: as given, by default, or the output that it stands for."""
        assert isinstance(node.target, OpOverload)
        if argument.name == out:
            return _OUTPUT
        own = [item for item in node.target._schema.arguments]
        names = [item.name for item in TAKES_TENSORS.get(node.target, node.target)._schema.arguments]
        position = names.index(argument.name)
        if position < len(node.args):
            return node.args[position]
        return node.kwargs.get(argument.name, node.kwargs.get(own[position].name, argument.default_value))

    def _argument(self, argument: Any, value: Any) -> list[int]:
        return self._item(argument.real_type, value)

    def _item(self, kind: Any, value: Any) -> list[int]:
        """Returns an argument as a part of the program."""
        if isinstance(value, _Output):
            return [OUTPUT, 0]
        if kind.kind() == "OptionalType":
            if value is None:
                return [NONE]
            inner = self._item(kind.getElementType(), value)
            return [OPTIONAL, 1, *inner]
        if kind.kind() == "ListType":
            items = value if isinstance(value, tuple | list) else [value]
            parts = [self._item(kind.getElementType(), item) for item in items]
            return [LIST, len(parts), *(number for part in parts for number in part)]
        if kind.kind() == "TensorType":
            is_tensor = isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor)
            return self._tensor(self._strided(value)) if is_tensor else _number(value)
        return self._plain(kind, value.meta["val"] if isinstance(value, fx.Node) else value)

    def _plain(self, kind: Any, value: Any) -> list[int]:
        if isinstance(value, torch.dtype):
            return [CODE, DTYPE_CODES[value]]
        if isinstance(value, torch.memory_format):
            return [CODE, FORMAT_CODES[value]]
        if isinstance(value, torch.layout):
            return [CODE, 0]
        if isinstance(value, torch.device):
            return [DEVICE, 0xFFFFFFFF if value.index is None else value.index]
        if isinstance(value, str):
            self._texts.append(value)
            return [TEXT, len(self._texts) - 1]
        if kind.kind() == "NumberType" and not isinstance(value, float | torch.SymFloat) and not self._in_product:
            return [TRUTH, int(value)] if isinstance(value, bool) else [INTEGER, *self._size(value)]
        if kind.kind() in ("FloatType", "NumberType"):
            if isinstance(value, torch.SymInt | torch.SymFloat):
                raise NotCallable("a real number that follows from sizes")
            return [REAL, _bits(float(value))]
        if kind.kind() == "BoolType":
            return [TRUTH, int(value)]
        if isinstance(value, int | torch.SymInt):
            return [INTEGER, *self._size(value)]
        raise NotCallable(f"an argument of type {type(value).__name__}")

    def _tensor(self, tensor: Strided) -> list[int]:
        if tensor.base not in self._inputs:
            self._inputs.append(tensor.base)
        position = self._inputs.index(tensor.base)
        if tensor.frame_position is not None:
            self._framed.add(tensor.frame_position)
            return [FRAMED, tensor.frame_position, *self._layout(tensor.fake, tensor.origin)]
        return [TENSOR, position, DTYPE_CODES[tensor.fake.dtype], 1, *self._layout(tensor.fake)]

    def _size(self, size: Size) -> list[int]:
        found = expression(size)
        return [0, found] if isinstance(found, int) else [1, self._graph.size_position(found)]

    def _sizes(self, sizes: Sequence[Size]) -> list[int]:
        return [number for size in sizes for number in self._size(size)]

    def _layout(self, fake: torch.Tensor, origin: Size = 0) -> list[int]:
        offset = self._size(fake.storage_offset() - origin)
        return [fake.ndim, *self._sizes(fake.shape), *self._sizes(fake.stride()), *offset]

    def _node(
        self,
        name: str,
        overload: str,
        layouts: Sequence[torch.Tensor],
        writes_outputs: bool,
        results: Sequence[int],
        arguments: Sequence[Sequence[int]],
        after: ir.Value | None,
    ) -> tuple[ir.Value, ...]:
        program = [len(layouts)]
        for layout in layouts:
            dims = in_memory_order(layout).shape
            program += [DTYPE_CODES[layout.dtype], *self._layout(layout), len(dims), *self._sizes(dims)]
        frame = self._inputs.index(self._graph.frame) if self._framed else 0
        program += [int(writes_outputs), len(results), *results, frame, len(arguments)]
        program += [number for argument in arguments for number in argument]
        texts = "".join(f"{text}\n" for text in self._texts)
        behind = [after] if after is not None and after not in self._inputs else []
        values = self._graph.op_with_outputs(
            CALL,
            len(layouts),
            *self._inputs,
            *behind,
            domain=DOMAIN,
            name=name,
            overload=overload,
            texts=texts,
            program=program,
        )
        self._graph.frame_readers.update(self._framed)
        for value, layout in zip(values, layouts, strict=True):
            describe(value, in_memory_order(layout))
        return values


class _Output:
    """Stands for the argument that a result is written into."""


_OUTPUT = _Output()


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


def _layout_for(fake: torch.Tensor) -> torch.Tensor:
    return dense(fake)


def _read_results(node: fx.Node, count: int) -> set[int]:
    """Returns the positions of the results that somebody reads; at least one, which shows that the node has run."""
    read = {user.args[1] for user in node.users if is_getitem(user)} if count > 1 else {0}
    return {index for index in read if isinstance(index, int)} or {0}


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _number(value: Any) -> list[int]:
    """Returns a number in place of a tensor: a tensor without dimensions, so that it does not change the result's type."""
    if isinstance(value, bool):
        return [NUMBER, DTYPE_CODES[torch.bool], int(value)]
    if isinstance(value, int):
        return [NUMBER, DTYPE_CODES[torch.int64], value]
    if isinstance(value, float):
        return [NUMBER, DTYPE_CODES[torch.float64], _bits(value)]
    raise NotCallable(f"a {type(value).__name__} in place of a tensor")


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


__all__ = ["CallWriter", "NotCallable", "Strided", "dense", "in_memory_order", "is_plain", "why_not_callable"]
