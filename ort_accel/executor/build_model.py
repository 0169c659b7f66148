"""Builds the ONNX model of a segment: lowered operators, and calls of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import onnx_ir as ir
import torch
from torch import fx

from ort_accel.graph.memory_layout import Order, has_no_gaps, have_same_strides, permuted_order, reverse
from ort_accel.graph.nodes import call, constant_of, fakes_in, is_getitem, is_random, is_size, is_view
from ort_accel.graph.symbolic_sizes import Size, expression, known_equal
from ort_accel.kernels.kernel_call import Calls
from ort_accel.lowering.aten_call import CallWriter
from ort_accel.lowering.call_program import Strided, dense, in_memory_order, whole
from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand, SizeInput, describe
from ort_accel.lowering.registry import lower, lowerings
from ort_accel.partition.assign import operands
from ort_accel.partition.segments import Body

aten = torch.ops.aten


@dataclass(frozen=True)
class Model:
    """The ONNX model of a segment, with the nodes and sizes that fill its inputs.

    Names in the model follow from its structure alone, so that equal segments have equal models.
    """

    model: ir.Model
    given: list[fx.Node]
    """All inputs, in the order of the segment."""
    inputs: list[fx.Node]
    """Those that are inputs of the session."""
    framed: list[fx.Node]
    """Inputs that only calls read, which get them as tensors of PyTorch."""
    readers: list[int]
    """The number of calls that read each of them."""
    number_ops: set[str]
    """Names of the copies of operators that are called (`kernels/number_ops.py`)."""
    sizes: list[SizeInput]
    outputs: list[ir.Value]
    input_orders: list[Order | None]
    output_orders: list[Order | None]
    """The order of dimensions in memory of tensors that are not contiguous. The model reads and writes that order."""


def build(body: Body, wanted: Sequence[fx.Node], opset: int, called: Calls | None = None) -> Model:
    """Builds the ONNX model of a segment's nodes; those in `called` call a kernel, or else PyTorch's operator."""
    return _Builder(body, wanted, opset, called or {}).model()


def in_order(fake: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Returns a tensor with its dimensions in this order."""
    return fake if order is None else fake.permute(order)


class _Builder:
    """Writes the nodes of a segment in order.

    A tensor has up to two forms in the model: a contiguous value, which ONNX Runtime's operators read, and a view of a
    value, which calls read. The second form is made from the first, or the other way round, when it is first read.
    """

    def __init__(self, body: Body, wanted: Sequence[fx.Node], opset: int, called: Calls) -> None:
        self._graph = OnnxGraph(opset)
        self._wanted = wanted
        self._called = called
        self._body = body
        self._computed = frozenset(body.nodes)
        self._given = [node for node in body.inputs if not is_size(node)]
        self._framed = [node for node in self._given if self._only_calls_read(node)]
        self._inputs = [node for node in self._given if node not in self._framed]
        self._orders = [permuted_order(node.meta["val"]) for node in self._inputs]
        self._operands: dict[fx.Node, Any] = {}
        self._strided: dict[fx.Node, Strided] = {}
        self._last_draw: ir.Value | None = None
        for position, (node, order) in enumerate(zip(self._inputs, self._orders, strict=True)):
            operand = self._graph.input(f"input_{position}", in_order(node.meta["val"], order))
            self._strided[node] = Strided(operand.value, dense(node.meta["val"]))
        for position, node in enumerate(self._framed):
            fake = node.meta["val"]
            self._strided[node] = Strided(
                self._graph.frame, fake, frame_position=position, origin=fake.storage_offset()
            )

    def _only_calls_read(self, node: fx.Node) -> bool:
        """True if all that read a tensor, or a view of it, are calls, which need no value of ONNX Runtime."""
        users = [user for user in node.users if user in self._computed]
        return all(
            user in self._called
            or ((is_view(user) or is_getitem(user)) and _keeps_dtype(user) and self._only_calls_read(user))
            for user in users
        ) and not (node in self._computed and node in self._wanted)

    def model(self) -> Model:
        """Returns the model that computes the wanted nodes."""
        wanted, needed = self._wanted, self._needed()
        for node in self._body.nodes:
            if node in needed:
                self._write(node)
        orders = [permuted_order(node.meta["val"]) for node in wanted]
        results = [self._result(node, order) for node, order in zip(wanted, orders, strict=True)]
        outputs = _distinct_values(self._graph, results)
        for value, node, order in zip(outputs, wanted, orders, strict=True):
            describe(value, in_order(node.meta["val"], order))
        model = self._graph.model(outputs, "segment")
        readers = [self._graph.frame_readers[position] for position in range(len(self._framed))]
        return Model(
            model,
            self._given,
            self._inputs,
            self._framed,
            readers,
            self._graph.number_ops,
            self._graph.all_size_inputs,
            outputs,
            self._orders,
            orders,
        )

    def _needed(self) -> set[fx.Node]:
        """Returns the nodes that have to run: those for the results, and draws. A kernel may leave operands unread."""
        needed: set[fx.Node] = set()
        pending = [*self._wanted, *(node for node in self._body.nodes if is_random(node))]
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                kernel = self._called.get(node)
                read = node.all_input_nodes if kernel is None else kernel.arguments
                pending += [item for item in read if isinstance(item, fx.Node)]
        return needed

    def _write(self, node: fx.Node) -> None:
        """Writes a node that computes something. Constants, views and parts of results come when they are read."""
        if node.op == "get_attr" or is_getitem(node) or is_view(node):
            return
        if node not in self._called:
            self._lower(node)
            return
        try:
            behind = [self._last_draw] if is_random(node) and self._last_draw is not None else []
            writer, kernel = CallWriter(self._graph, self.strided, behind), self._called[node]
            results = writer.call(node) if kernel is None else writer.kernel(node, kernel)
        except Exception as error:
            raise NotLowerable(f"{call(node)}: {error}") from error
        if is_random(node):
            self._last_draw = next(result.base for result in results if result is not None)
        if isinstance(node.meta["val"], torch.Tensor):
            self._strided[node] = cast("Strided", results[0])
            return
        for user in node.users:
            if is_getitem(user) and (result := results[cast("int", user.args[1])]) is not None:
                self._strided[user] = result

    def _lower(self, node: fx.Node) -> None:
        args, kwargs = operands(node, self.operand)
        fakes = node.meta["val"]
        try:
            lowered = lower(self._graph, node.target, args, kwargs, fakes)
        except Exception as error:
            raise NotLowerable(f"{call(node)}: {error}") from error
        if isinstance(fakes, torch.Tensor):
            self._operands[node] = Operand(lowered[0], fakes)
        else:
            self._operands[node] = [None if r is None else Operand(r, f) for r, f in zip(lowered, fakes, strict=True)]

    def operand(self, node: fx.Node) -> Any:
        """Returns the contiguous value of a tensor, or those of several tensors."""
        if node not in self._operands:
            self._operands[node] = self._make_operand(node)
        return self._operands[node]

    def _make_operand(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return Operand(self._graph.tensor(constant_of(node)), node.meta["val"])
        if node in self._strided:
            return self._contiguous(node, self._strided[node])
        if is_getitem(node):
            whole, index = node.args
            return self.operand(cast("fx.Node", whole))[index]
        if node.target in lowerings() and node not in self._called:
            self._lower(node)
            return self._operands[node]
        return self._contiguous(node, self.strided(node))

    def _contiguous(self, node: fx.Node, view: Strided) -> Operand:
        """Returns the value of a view: the memory as it is, or with its dimensions in another order, or a copy."""
        fake = node.meta["val"]
        if node in self._computed:
            return Operand(self._memory(view, fake.new_empty(fake.shape)), fake)
        order = permuted_order(view.fake)
        value = view.base if order is None else self._graph.op("Transpose", view.base, perm=reverse(order))
        return Operand(value, fake)

    def strided(self, node: fx.Node) -> Strided:
        """Returns a tensor as a view of a value's memory."""
        if node not in self._strided:
            self._strided[node] = self._make_strided(node)
        return self._strided[node]

    def _make_strided(self, node: fx.Node) -> Strided:
        taken = cast("fx.Node", node.args[0]) if is_getitem(node) else node
        if node.op == "get_attr" or node not in self._computed or not is_view(taken):
            operand = self.operand(node)
            return whole(operand.value, operand.fake.new_empty(operand.fake.shape))
        source, view = self._taken(taken)
        return replace(source, fake=view if taken is node else view[node.args[1]])

    def _taken(self, node: fx.Node) -> tuple[Strided, Any]:
        """Takes a view of the memory where its source lies; of a copy where that memory allows no such view."""
        first = cast("fx.Node", node.args[0])
        source, fake = self.strided(first), first.meta["val"]
        names_positions = node.target is aten.as_strided.default
        if names_positions and not _is_all_memory(fake):
            raise NotLowerable(f"{call(node)}: it names positions in the memory of a larger tensor")
        lies_alike = not names_positions or (_covers(source.fake, fake, fake) and source.origin == 0)
        if lies_alike and (taken := _apply(node, source.fake)) is not None:
            return source, taken
        copied = self._copy(source, dense(fake) if names_positions else fake.new_empty(fake.shape))
        if (taken := _apply(node, copied.fake)) is None:
            raise NotLowerable(f"{call(node)}: it is no view of contiguous memory")
        return copied, taken

    def _copy(self, source: Strided, layout: torch.Tensor) -> Strided:
        return CallWriter(self._graph, self.strided).copy(source, layout)

    def _result(self, node: fx.Node, order: Order | None) -> ir.Value:
        """Returns a value with the dimensions of a result in the order of memory."""
        if self._lies_in_strided(node):
            return self._memory(self.strided(node), dense(node.meta["val"]))
        value: ir.Value = self.operand(node).value
        return value if order is None else self._graph.op("Transpose", value, perm=order)

    def _lies_in_strided(self, node: fx.Node) -> bool:
        """True for the tensors that exist as views, and for views of them."""
        if node in self._strided:
            return True
        is_part = node in self._computed and (is_view(node) or is_getitem(node))
        return is_part and self._lies_in_strided(cast("fx.Node", node.args[0]))

    def _memory(self, view: Strided, layout: torch.Tensor) -> ir.Value:
        """Returns a value whose memory has this layout: that of the view, or of a copy."""
        memory = view.memory
        if memory is None or not _covers(view.fake, memory, layout):
            return self._copy(view, layout).base
        sizes = in_memory_order(layout).shape
        return view.base if _equal(sizes, in_memory_order(memory).shape) else self._graph.reshape(view.base, sizes)


def _keeps_dtype(view: fx.Node) -> bool:
    source = view.all_input_nodes[0].meta["val"]
    return all(fake.dtype == source.dtype for fake in fakes_in(view.meta["val"]) if isinstance(source, torch.Tensor))


def _apply(node: fx.Node, source: torch.Tensor) -> Any:
    """Returns the view that a node takes, taken of another tensor; None if it would have to copy."""
    assert isinstance(node.target, torch._ops.OpOverload)
    _, *args = fx.map_arg(node.args, lambda item: item.meta["val"])
    kwargs = fx.map_arg(node.kwargs, lambda item: item.meta["val"])
    target = aten.view.default if node.target is aten._unsafe_view.default else node.target
    try:
        taken = target(source, *args, **kwargs)
    except (RuntimeError, ValueError):
        return None
    memory = source.untyped_storage()._cdata
    return taken if all(view.untyped_storage()._cdata == memory for view in fakes_in(taken)) else None


def _is_all_memory(fake: torch.Tensor) -> bool:
    """True if a tensor begins with its memory and has no gaps."""
    return expression(fake.storage_offset()) == 0 and has_no_gaps(fake)


def _covers(view: torch.Tensor, memory: torch.Tensor, layout: torch.Tensor) -> bool:
    """True if a view has this layout, and all the elements of the memory."""
    return (
        expression(view.storage_offset()) == 0
        and known_equal(view.numel(), memory.numel())
        and _equal(view.shape, layout.shape)
        and have_same_strides(view, layout)
    )


def _equal(sizes: Sequence[Size], others: Sequence[Size]) -> bool:
    return len(sizes) == len(others) and all(map(known_equal, sizes, others))


def _distinct_values(graph: OnnxGraph, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns values for outputs: never an input, a constant, or the same value twice."""
    distinct: list[ir.Value] = []
    for value in values:
        is_computed = value.producer() is not None and value not in distinct
        distinct.append(value if is_computed else graph.op("Identity", value))
    return distinct
