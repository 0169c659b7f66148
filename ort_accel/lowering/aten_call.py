"""Writes calls as nodes of a model: `AtenCall` for operators of PyTorch, `KernelCall` for the native library's kernels.

ONNX Runtime then runs every operator that PyTorch has, in one session. A call reads its tensors as views of the memory
that they lie in, so that transposes and slices before it cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch._ops import OpOverload

from ort_accel.graph.memory_layout import have_same_strides, is_plain
from ort_accel.graph.nodes import CHECKS, fakes_in, is_data_dependent, is_getitem, is_view, is_watch_call, writes
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.kernels import number_ops
from ort_accel.kernels.host_copies import is_host_copy
from ort_accel.kernels.kernel_call import KernelArgument, KernelCall, Output, Stride
from ort_accel.kernels.output_buffers import out_overload
from ort_accel.lowering.call_program import (
    OUTPUT,
    ProgramWriter,
    ResultBuffer,
    Strided,
    dense,
    in_memory_order,
    joined,
    whole,
)
from ort_accel.lowering.onnx_graph import DTYPES, OnnxGraph, describe

DOMAIN, ATEN_CALL, KERNEL_CALL = "ort_accel", "AtenCall", "KernelCall"

UNREAD, NO_TENSOR = -1, -2
"""Results of an operator that belong to no output: a tensor that nobody reads, and a number."""

aten = torch.ops.aten

TAKES_TENSORS: dict[Any, OpOverload[..., Any]] = {
    aten.bitwise_and.Scalar: aten.bitwise_and.Tensor,
    aten.bitwise_or.Scalar: aten.bitwise_or.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.remainder.Scalar: aten.remainder.Tensor,
    aten.where.Scalar: aten.where.self,
    aten.where.ScalarOther: aten.where.self,
    aten.where.ScalarSelf: aten.where.self,
}
"""Overloads with a tensor in place of a number, which need no copy of the operator with typed numbers."""

COMPARISONS = frozenset([aten.eq, aten.ge, aten.gt, aten.le, aten.lt, aten.ne])

TAKES_NUMBERS: dict[Any, OpOverload[..., Any]] = {
    aten.add.Tensor: aten.add.Scalar,
    aten.div.Tensor: aten.div.Scalar,
    aten.mul.Tensor: aten.mul.Scalar,
    aten.sub.Tensor: aten.sub.Scalar,
}
"""Overloads with a number in place of a tensor, for numbers that follow from the sizes of a batch."""

RESIZE_OUTPUTS = {aten.binary_cross_entropy, aten.huber_loss, aten.mse_loss, aten.smooth_l1_loss}
"""Operators that write a larger result into the given tensor before they reduce it."""

COPIES = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}
"""Operators that copy a tensor, into another type or layout."""

PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
"""Operators with functions of their own in the C interface, whose numbers are real."""

REAL_TYPE = aten.native_layer_norm.default._schema.arguments[-1].real_type
"""The type of an argument that is a real number, such as the epsilon of a norm."""


FLOAT_OF_SIZES = "a float that is computed from sizes or from numbers that change"


def reads_float_of_sizes(node: fx.Node) -> bool:
    """True if an argument of a node is such a float, which neither a model nor a call can be given."""
    return any(isinstance(item.meta.get("val"), torch.SymFloat) for item in node.all_input_nodes)


def why_not_callable(node: fx.Node) -> str:
    """Returns why a node cannot be called through PyTorch's C interface; nothing if it can."""
    if not isinstance(node.target, OpOverload) or node.target in CHECKS:
        return "not an operator that returns tensors"
    if writes(node) or is_data_dependent(node) or is_watch_call(node) or is_host_copy(node):
        return "its place among the other nodes is fixed, or its sizes follow from data"
    returns = {kind for item in node.target._schema.returns for kind in _kinds(item.real_type)}
    if not is_view(node) and not returns <= {"TensorType", "IntType", "SymIntType"}:
        return "it returns lists"
    if reads_float_of_sizes(node):
        return FLOAT_OF_SIZES
    results = fakes_in(node.meta.get("val"))
    for tensor in fakes_in([item.meta.get("val") for item in node.all_input_nodes]) + results:
        if tensor.dtype not in DTYPES or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
    return "" if results else "it returns no tensor"


def needs_copy(node: fx.Node) -> bool:
    """True if the operator of a callable node makes its results itself, so that a call copies them."""
    return not _form_of(node, set()).has_buffer


def _kinds(kind: Any) -> Iterator[str]:
    """Yields the kind of a type and of those within it."""
    while kind is not None:
        yield kind.kind()
        kind = kind.getElementType() if kind.kind() in ("ListType", "OptionalType") else None


@dataclass(frozen=True)
class _Form:
    """An overload to call in place of a node's, and its arguments."""

    name: str
    overload: str
    types: list[Any]
    values: list[Any]
    has_buffer: bool
    """True if the operator writes its result into a tensor that it is given."""


def _form_of(node: fx.Node, names: set[str]) -> _Form:
    """Returns the form in which a node is called. `names` collects the copies of operators that it needs."""
    target, values = _with_numbers_placed(node)
    arguments = target._schema.arguments
    types = [argument.real_type for argument in arguments]
    if target in COPIES:
        return _Form("", "", types[:1], values[:1], has_buffer=True)
    if target in PRODUCTS:
        types = [REAL_TYPE if _is_number(kind) else kind for kind in types]
    elif any(map(_is_number, types)):
        numbers = [_number_type(value) for kind, value in zip(types, values, strict=True) if _is_number(kind)]
        name = number_ops.name_of(target, numbers)
        number_ops.define(name)
        names.add(name)
        return _Form(f"{number_ops.NAMESPACE}::{name}", "", types, values, has_buffer=False)
    found = None if target.overloadpacket in RESIZE_OUTPUTS else out_overload(target)
    if found is None:
        return _Form(target._schema.name, target._schema.overload_name, types, values, has_buffer=False)
    into, out = found
    by_name = dict(zip((argument.name for argument in arguments), zip(types, values, strict=True), strict=True))
    by_name[out] = (target._schema.returns[0].real_type, ResultBuffer())
    ordered = [by_name[argument.name] for argument in into._schema.arguments]
    return _Form(
        into._schema.name, into._schema.overload_name, [k for k, _ in ordered], [v for _, v in ordered], has_buffer=True
    )


def _with_numbers_placed(node: fx.Node) -> tuple[OpOverload[..., Any], list[Any]]:
    """Returns an overload with tensors in place of numbers, or the other way round, and the values of its arguments."""
    assert isinstance(node.target, OpOverload)
    values = [
        node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        for position, argument in enumerate(node.target._schema.arguments)
    ]
    second = values[1] if len(values) > 1 else None
    is_size = isinstance(second, fx.Node) and not isinstance(second.meta["val"], torch.Tensor)
    if isinstance(second, float) and node.target.overloadpacket in COMPARISONS and not _is_floating(values[0]):
        return node.target, values  # the number is compared in single precision, and a tensor of it would be in double
    return (TAKES_NUMBERS if is_size else TAKES_TENSORS).get(node.target, node.target), values


def _is_floating(value: object) -> bool:
    return isinstance(value, fx.Node) and bool(value.meta["val"].is_floating_point())


def _is_number(kind: Any) -> bool:
    return "NumberType" in _kinds(kind)


def _number_type(value: object) -> str:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int | torch.SymInt) else "float"


class CallWriter:
    """Writes calls into a model."""

    def __init__(
        self, graph: OnnxGraph, strided: Callable[[fx.Node], Strided], behind: Sequence[ir.Value] = ()
    ) -> None:
        """`strided` returns the tensor of a node as a view. Calls run after the operators that compute `behind`."""
        self._graph, self._strided, self._behind = graph, strided, behind

    def call(self, node: fx.Node) -> list[Strided | None]:
        """Writes a node's operator. Returns its results."""
        form = _form_of(node, self._graph.number_ops)
        fakes = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
        read = [at for at in _read_results(node, len(fakes)) if isinstance(fakes[at], torch.Tensor)]
        results = [
            read.index(at) if at in read else UNREAD if isinstance(fake, torch.Tensor) else NO_TENSOR
            for at, fake in enumerate(fakes)
        ]
        writer = ProgramWriter(self._graph, self._strided)
        arguments = [writer.argument(kind, value) for kind, value in zip(form.types, form.values, strict=True)]
        layouts = [dense(fakes[at]) for at in read]
        attributes = _attributes(form.name, form.overload, writer.texts)
        values = self._node(writer, ATEN_CALL, attributes, layouts, results, arguments, form.has_buffer)
        return _in_places(len(fakes), read, map(whole, values, layouts))

    def kernel(self, node: fx.Node, call: KernelCall) -> list[Strided | None]:
        """Writes a call of one of the native library's kernels that computes a node. Returns the node's results."""
        writer = ProgramWriter(self._graph, self._strided)
        fakes = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
        written = [argument.position for argument in call.arguments if isinstance(argument, Output)]
        read = self._read(call)

        def argument(value: KernelArgument) -> list[int]:
            match value:
                case Output():
                    return [OUTPUT, written.index(value.position)]
                case Stride():
                    return writer.number(read[value.node].fake.stride(value.dim))
                case fx.Node():
                    return writer.tensor(read[value])
            return writer.number(value)

        arguments = [argument(value) for value in call.arguments]
        layouts = [fakes[position] for position in written]
        values = self._node(writer, KERNEL_CALL, {"name": call.name}, layouts, [], arguments)
        return _in_places(len(fakes), written, map(whole, values, layouts))

    def _read(self, call: KernelCall) -> dict[fx.Node, Strided]:
        """Returns the tensors that a kernel reads: contiguous, unless the kernel gets their strides."""
        with_strides = {argument.node for argument in call.arguments if isinstance(argument, Stride)}
        tensors = {node: self._strided(node) for node in call.arguments if isinstance(node, fx.Node)}
        if call.reads_any_layout:
            return {node: self._as_in_graph(tensor, node.meta["val"]) for node, tensor in tensors.items()}
        for node, tensor in tensors.items():
            if not is_plain(tensor.fake) and (node not in with_strides or expression(tensor.fake.stride(-1)) != 1):
                tensors[node] = self.copy(tensor, tensor.fake.new_empty(tensor.fake.shape))
        return tensors

    def _as_in_graph(self, tensor: Strided, fake: torch.Tensor) -> Strided:
        """Returns a tensor with the strides that it has in the graph, or without the gaps that it has there."""
        layout = dense(fake)
        return tensor if have_same_strides(tensor.fake, layout) else self.copy(tensor, layout)

    def copy(self, source: Strided, layout: torch.Tensor) -> Strided:
        """Writes a copy of a view into memory of its own, in the order of `layout`."""
        writer = ProgramWriter(self._graph, self._strided)
        (value,) = self._node(writer, ATEN_CALL, _attributes("", "", []), [layout], [], [writer.tensor(source)])
        return whole(value, layout)

    def _node(
        self,
        writer: ProgramWriter,
        operator: str,
        attributes: Mapping[str, str],
        layouts: Sequence[torch.Tensor],
        results: Sequence[int],
        arguments: Sequence[Sequence[int]],
        has_buffer: bool = True,
    ) -> tuple[ir.Value, ...]:
        program = [len(layouts), *joined([writer.result(layout) for layout in layouts])]
        program += [int(has_buffer), len(results), *results]
        program += [writer.inputs.index(self._graph.frame) if writer.framed else 0]
        program += [len(arguments), *joined(arguments)]
        inputs = list(dict.fromkeys([*writer.inputs, *self._behind]))
        values = self._graph.op_with_outputs(
            operator, len(layouts), *inputs, domain=DOMAIN, program=program, **attributes
        )
        self._graph.frame_readers.update(writer.framed)
        for value, layout in zip(values, layouts, strict=True):
            describe(value, in_memory_order(layout))
        return values


def _in_places(count: int, positions: Iterable[int], results: Iterable[Strided]) -> list[Strided | None]:
    """Returns the results of an operator, with None for those that are not computed."""
    found = dict(zip(positions, results, strict=True))
    return [found.get(position) for position in range(count)]


def _attributes(name: str, overload: str, texts: Sequence[str]) -> dict[str, str]:
    return {"name": name, "overload": overload, "texts": "".join(f"{text}\n" for text in texts)}


def _read_results(node: fx.Node, count: int) -> list[int]:
    """Returns the positions of the results that somebody reads; at least one, which shows that the node has run."""
    read = {user.args[1] for user in node.users if is_getitem(user)} if count > 1 else {0}
    return sorted(index for index in read if isinstance(index, int)) or [0]
