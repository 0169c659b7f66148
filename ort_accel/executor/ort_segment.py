"""A segment that ONNX Runtime runs: one model, one session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from traceback import clear_frames
from typing import Any, cast

import onnx_ir as ir
import torch
from torch import fx

from ort_accel.executor.torch_segment import PyTorchSegment
from ort_accel.graph.memory_layout import Order, order_in_memory, reverse
from ort_accel.graph.nodes import call, constant_of, is_part, is_size
from ort_accel.graph.symbolic_sizes import SizeFunction, expression, hinted_bytes, is_known
from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand, SizeInput, describe
from ort_accel.lowering.registry import lower
from ort_accel.memory.heap_tensors import unfilled
from ort_accel.memory.out_of_memory import is_lack_of_memory
from ort_accel.partition.assign import operands
from ort_accel.partition.segments import Body
from ort_accel.reporting import Runner, Segment
from ort_accel.runtime.dlpack import Bound, OrtValue, sizes_to_ort, to_ort
from ort_accel.runtime.ort_pool import release_unused
from ort_accel.runtime.sessions import Sessions


@dataclass(frozen=True)
class Model:
    """The ONNX model of a segment, and how its inputs are filled.

    Names in it follow from its structure alone, so that segments that are alike have equal models.
    """

    model: ir.Model
    inputs: list[fx.Node]
    sizes: list[SizeInput]
    outputs: list[ir.Value]
    input_orders: list[Order | None]
    output_orders: list[Order | None]
    """How tensors lie in memory where they are not plain: the model reads and writes them as they lie."""


def build(body: Body, wanted: Sequence[fx.Node], opset: int) -> Model:
    """Write the nodes of a segment as an ONNX model."""
    graph = OnnxGraph(opset)
    inputs = [node for node in body.inputs if not is_size(node)]
    input_orders = [order_in_memory(node.meta["val"]) for node in inputs]
    values: dict[fx.Node, Any] = {
        node: _input(graph, f"input_{position}", node.meta["val"], order)
        for position, (node, order) in enumerate(zip(inputs, input_orders, strict=True))
    }
    for node in body.nodes:
        if node.op == "get_attr":
            values[node] = Operand(graph.tensor(constant_of(node)), node.meta["val"])
            continue
        if is_part(node):
            whole, index = node.args
            values[node] = values[cast("fx.Node", whole)][index]
            continue
        args, kwargs = operands(node, values.__getitem__)
        fakes = node.meta["val"]
        try:
            results = lower(graph, node.target, args, kwargs, fakes)
        except Exception as error:
            raise NotLowerable(f"{call(node)}: {error}") from error
        if isinstance(fakes, torch.Tensor):
            values[node] = Operand(results[0], fakes)
        else:
            values[node] = [None if r is None else Operand(r, f) for r, f in zip(results, fakes, strict=True)]
    output_orders = [order_in_memory(node.meta["val"]) for node in wanted]
    laid = [_as_laid(graph, values[node], order) for node, order in zip(wanted, output_orders, strict=True)]
    outputs = _own_values(graph, laid)
    for value, node, order in zip(outputs, wanted, output_orders, strict=True):
        describe(value, _permuted(node.meta["val"], order))
    model = graph.model(outputs, "segment")
    return Model(model, inputs, list(graph.size_inputs.values()), outputs, input_orders, output_orders)


def _input(graph: OnnxGraph, name: str, fake: torch.Tensor, order: Order | None) -> Operand:
    given = graph.input(name, _permuted(fake, order))
    return given if order is None else Operand(graph.op("Transpose", given, perm=reverse(order)), fake)


def _as_laid(graph: OnnxGraph, operand: Operand, order: Order | None) -> ir.Value:
    return operand.value if order is None else graph.op("Transpose", operand, perm=order)


def _permuted(fake: torch.Tensor, order: Order | None) -> torch.Tensor:
    return fake if order is None else fake.permute(order)


def _own_values(graph: OnnxGraph, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Outputs as values of their own: never an input, a constant, or the same value twice."""
    own: list[ir.Value] = []
    for value in values:
        is_computed = value.producer() is not None and value not in own
        own.append(value if is_computed else graph.op("Identity", value))
    return own


def _converter(lasting: bool, order: Order | None) -> Callable[[torch.Tensor], OrtValue]:
    """Hands a tensor over as it lies in memory; one that usually stays at its place is handed over once."""
    convert = Bound().value if lasting else to_ort
    return convert if order is None else lambda tensor: convert(tensor.permute(order))


class Twin:
    """The segment as PyTorch runs it, made when it is first needed."""

    def __init__(self, body: Body, wanted: Sequence[fx.Node], owner: fx.GraphModule) -> None:
        self._made = cache(lambda: PyTorchSegment(body, wanted, owner))

    def __call__(self, tensors: list[Any], symbols: dict[str, int]) -> Sequence[Any]:
        """Run with these inputs."""
        return self._made()(tensors, symbols)

    def __reduce__(self) -> Any:
        return _as_kept, (self._made().__getstate__(),)


def _as_kept(state: dict[str, Any]) -> PyTorchSegment:
    segment = PyTorchSegment.__new__(PyTorchSegment)
    segment.__dict__.update(state)
    return segment


def lie_in_pool(results: Iterable[fx.Node], pool_from: float) -> bool:
    """Whether the results of a segment lie in ONNX Runtime's pool: all of them do, or none."""
    values = [node.meta["val"] for node in results]
    return any(hinted_bytes(value) >= pool_from or not all(map(is_known, value.shape)) for value in values)


def ort_makes_results(_: dict[str, int]) -> Sequence[torch.Tensor]:
    """No tensors for a model to write into: ONNX Runtime makes them."""
    return ()


class Results:
    """Makes the tensors that a model is to write its results into: memory of the C library, which each of them gives
    back by itself. What ONNX Runtime's pool hands out keeps its neighbours in the pool."""

    def __init__(self, wanted: Sequence[fx.Node], orders: Sequence[Order | None]) -> None:
        shapes = [_permuted(node.meta["val"], order).shape for node, order in zip(wanted, orders, strict=True)]
        self._ranks = [len(shape) for shape in shapes]
        self._types = [node.meta["val"].dtype for node in wanted]
        self._sizes = SizeFunction(expression(size) for shape in shapes for size in shape)

    def __call__(self, symbols: dict[str, int]) -> list[torch.Tensor]:
        """As many as the model has results."""
        sizes = iter(self._sizes(symbols))
        shapes = [[next(sizes) for _ in range(rank)] for rank in self._ranks]
        return [unfilled(shape, dtype) for shape, dtype in zip(shapes, self._types, strict=True)]


class OrtSegment:
    """Runs the nodes of a segment in one session; where that fails, PyTorch runs the same nodes.

    A run fails for a bad batch, for which PyTorch then raises what eager mode raises, or for lack of memory or a fault
    in ONNX Runtime, where PyTorch's result stands and `on_failure` decides whether ONNX Runtime is tried again.
    """

    def __init__(
        self,
        model: Model,
        sessions: Sessions,
        bound: Callable[[fx.Node], bool],
        twin: Callable[[list[Any], dict[str, int]], Sequence[Any]],
        on_failure: Callable[[Exception], bool],
        name: str,
        results: Callable[[dict[str, int]], Sequence[torch.Tensor]] = ort_makes_results,
        record: Segment | None = None,
    ) -> None:
        """`results` makes what the model writes into. `record` is told who ran the segment."""
        self.inputs = model.inputs
        names = [value.name or "" for value in model.model.graph.inputs]
        content = ir.to_proto(model.model).SerializeToString()
        outputs = [value.name or "" for value in model.outputs]
        self._made_from = sessions, content, names, outputs, name
        self._given = [(bound(node), order) for node, order in zip(model.inputs, model.input_orders, strict=True)]
        self._begin()
        self._permuted = [
            (position, reverse(order)) for position, order in enumerate(model.output_orders) if order is not None
        ]
        self._sizes = SizeFunction(item for size in model.sizes for item in size.sizes)
        self._size_inputs = model.sizes
        self._twin, self._on_failure = twin, on_failure
        self._results = results
        self._given_up = False
        self._record = record or Segment(name, Runner.ORT, {})

    def _begin(self) -> None:
        """Make what belongs to this process."""
        sessions, *model = self._made_from
        self._session = sessions.create(*model)
        self._convert = [_converter(lasting, order) for lasting, order in self._given]
        self._ready: tuple[tuple[int, ...], list[OrtValue]] = ((), [])

    def __getstate__(self) -> dict[str, Any]:
        own = ("_session", "_convert", "_ready")
        return {name: value for name, value in self.__dict__.items() if name not in own} | {"inputs": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __call__(self, tensors: list[Any], symbols: dict[str, int]) -> Sequence[Any]:
        """Run with these inputs."""
        if self._given_up:
            return self._twin(tensors, symbols)
        try:
            results = self._by_onnx_runtime(tensors, symbols)
        except Exception as error:
            replacement = self._by_pytorch(error, tensors, symbols)
            self._record.runner = Runner.PYTORCH
            self._given_up = not self._on_failure(error)
            return replacement
        self._record.runner = Runner.ORT
        for position, order in self._permuted:
            results[position] = results[position].permute(order)
        return results

    def _by_onnx_runtime(self, tensors: list[Any], symbols: dict[str, int]) -> list[torch.Tensor]:
        feeds = [convert(tensor) for convert, tensor in zip(self._convert, tensors, strict=True)]
        return self._session(feeds + self._size_values(symbols), self._results(symbols))

    def _by_pytorch(self, error: Exception, tensors: list[Any], symbols: dict[str, int]) -> Sequence[Any]:
        """What PyTorch makes of a run that failed; it gets the memory that the failed run and the pool hold."""
        clear_frames(error.__traceback__)
        if is_lack_of_memory(error):
            with suppress(Exception):  # there may not even be the little memory that this takes
                release_unused()
        return self._twin(tensors, symbols)

    def _size_values(self, symbols: dict[str, int]) -> list[OrtValue]:
        """The model's size inputs; made anew only when a size has changed."""
        sizes = self._sizes(symbols)
        ready = self._ready  # read once: another thread may be running with other sizes
        if sizes is not ready[0]:
            remaining = iter(sizes)
            values = [
                sizes_to_ort([next(remaining) for _ in size.sizes], scalar=size.scalar) for size in self._size_inputs
            ]
            ready = self._ready = (sizes, values)
        return ready[1]
