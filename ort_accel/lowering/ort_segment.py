"""A segment that ONNX Runtime runs: one model, one session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import onnx_ir as ir
import torch
from torch import fx

from ort_accel.lowering.assign import operands
from ort_accel.lowering.nodes import constant_of, is_part, is_size
from ort_accel.lowering.onnx_graph import OnnxGraph, Operand, SizeInput, describe
from ort_accel.lowering.pytorch_segment import PyTorchSegment
from ort_accel.lowering.registry import lower
from ort_accel.lowering.segments import Body
from ort_accel.lowering.sizes import SizeFunction
from ort_accel.runtime.sessions import Sessions
from ort_accel.runtime.tensors import Bound, OrtValue, sizes_to_ort, to_ort


@dataclass(frozen=True)
class Model:
    """The ONNX model of a segment, and how its inputs are filled."""

    model: ir.Model
    inputs: list[fx.Node]
    sizes: list[SizeInput]
    outputs: list[ir.Value]


def build(body: Body, wanted: Sequence[fx.Node], opset: int, name: str) -> Model:
    """Write the nodes of a segment as an ONNX model."""
    graph = OnnxGraph(opset)
    inputs = [node for node in body.inputs if not is_size(node)]
    values: dict[fx.Node, Any] = {node: graph.input(node.name, node.meta["val"]) for node in inputs}
    for node in body.nodes:
        if node.op == "get_attr":
            values[node] = Operand(graph.tensor(constant_of(node)), node.meta["val"])
            continue
        if is_part(node):
            whole, index = node.args
            values[node] = values[cast("fx.Node", whole)][index]
            continue
        args, kwargs = operands(node, values.__getitem__)
        results = lower(graph, node.target, args, kwargs, node.meta["val"])
        fakes = node.meta["val"]
        if isinstance(fakes, torch.Tensor):
            values[node] = Operand(results[0], fakes)
        else:
            values[node] = [None if r is None else Operand(r, f) for r, f in zip(results, fakes, strict=True)]
    outputs = _own_values(graph, [values[node].value for node in wanted])
    for value, node in zip(outputs, wanted, strict=True):
        describe(value, node.meta["val"])
    return Model(graph.model(outputs, name), inputs, list(graph.size_inputs.values()), outputs)


def _own_values(graph: OnnxGraph, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Outputs as values of their own: never an input, a constant, or the same value twice."""
    own: list[ir.Value] = []
    for value in values:
        is_computed = value.producer() is not None and value not in own
        own.append(value if is_computed else graph.op("Identity", value))
    return own


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
        twin: Callable[[], PyTorchSegment],
        on_failure: Callable[[Exception], bool],
    ) -> None:
        self.inputs = model.inputs
        names = [node.name for node in model.inputs] + [size.value.name or "" for size in model.sizes]
        content = ir.to_proto(model.model).SerializeToString()
        outputs = [value.name or "" for value in model.outputs]
        self._session = sessions.create(content, names, outputs, model.model.graph.name or "")
        self._convert = [Bound().value if bound(node) else to_ort for node in model.inputs]
        self._sizes = SizeFunction(item for size in model.sizes for item in size.sizes)
        self._size_inputs = model.sizes
        self._ready: tuple[tuple[int, ...], list[OrtValue]] = ((), [])
        self._twin, self._on_failure = twin, on_failure
        self._given_up = False

    def __call__(self, tensors: list[Any], symbols: dict[str, int]) -> Sequence[Any]:
        """Run with these inputs."""
        if self._given_up:
            return self._twin()(tensors, symbols)
        try:
            feeds = [convert(tensor) for convert, tensor in zip(self._convert, tensors, strict=True)]
            return self._session(feeds + self._size_values(symbols))
        except Exception as error:
            results = self._twin()(tensors, symbols)
            self._given_up = not self._on_failure(error)
            return results

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
