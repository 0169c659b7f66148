"""Lowerings by torch's exporter library (onnxscript's torchlib), for operators that have no lowering of ours.

`torchlib_fallback.json` lists the operators and types. `python -m benchmarks.torchlib_tail` makes the list: it runs
torch's own samples, with NaN and infinities mixed in, and keeps those whose results equal eager's.

Private interfaces, imported when the first such operator is met: `OpRecorder` and `SymbolicTensor` of
`torch.onnx._internal.exporter`, checked on torch 2.13.0; the registry of `onnxscript.function_libs.torch_lib` and
`onnxscript.evaluator.default_as`, checked on onnxscript 0.7.2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ort_accel.lowering.onnx_graph import DTYPES, NotLowerable, OnnxGraph, Operand, describe

LIST = Path(__file__).with_suffix(".json")

OLDEST_OPSET = 18
"""The operator set that torchlib is written in."""


def torchlib_lowerings() -> dict[OpOverload[..., Any], Callable[..., Any]]:
    """Return a lowering for each operator of the list."""
    allowed: dict[str, list[str]] = json.loads(LIST.read_text())["operators"]
    return {overload(name): lowering(name, set(types)) for name, types in allowed.items()}


def overload(name: str) -> OpOverload[..., Any]:
    """Return torch's operator of a name such as `aten.atan2.default`."""
    namespace, packet, variant = name.split(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), packet), variant)  # type: ignore[no-any-return]


def lowering(name: str, types: set[str]) -> Callable[..., Any]:
    """Return a lowering that lets torchlib write one operator, for inputs of these types."""

    def write(graph: OnnxGraph, *args: Any, **kwargs: Any) -> Any:
        found = types_of(item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Operand))
        if found not in types:
            raise NotLowerable(f"torchlib's way of it was not found equal to eager's in {found}")
        if graph.opset < OLDEST_OPSET:
            raise NotLowerable(f"torchlib needs operator set {OLDEST_OPSET}")
        return _Recording(graph).write(name, args, kwargs)

    return write


def types_of(tensors: Iterable[Operand | torch.Tensor]) -> str:
    """Return the types of an operator's inputs, such as `float32 int64`."""
    return " ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


@cache
def torchlib() -> dict[str, Any]:
    """Return torchlib's functions for real numbers, by the name of the operator."""
    from onnxscript.function_libs.torch_lib import ops  # noqa: F401  fills the registry
    from onnxscript.function_libs.torch_lib.registration import default_registry

    found = {}
    for qualified, functions in default_registry.items():
        if functions.overloads:
            packet, _, variant = qualified.partition(".")
            found[f"{packet.replace('::', '.')}.{variant or 'default'}"] = functions.overloads[0]
    return found


class _Recording:
    """Records the operators of one torchlib function, and moves them into our graph."""

    def __init__(self, graph: OnnxGraph) -> None:
        from onnxscript import values

        self._graph = graph
        self._opset = values.Opset("", OLDEST_OPSET)
        self._stand_ins: dict[ir.Value, ir.Value] = {}

    def write(self, name: str, args: Any, kwargs: Any) -> Any:
        from onnxscript import evaluator
        from torch.onnx._internal.exporter import _building

        recorder_type: Any = _building.OpRecorder
        recorder = recorder_type(self._opset, {})
        with evaluator.default_as(recorder):
            try:
                results = torchlib()[name](*self._converted(args), **self._converted(kwargs))
            except Exception as error:
                raise NotLowerable(f"torchlib: {_innermost(error)}") from error
        if recorder.functions:
            raise NotLowerable("torchlib: a function of its own")
        self._graph.extend(self._nodes(recorder.nodes))
        return tuple(map(self._unwrapped, results)) if isinstance(results, list | tuple) else self._unwrapped(results)

    def _converted(self, arguments: Any) -> Any:
        return pytree.tree_map(self._argument, arguments)

    def _argument(self, item: object) -> object:
        """Return an argument in the form that torchlib takes."""
        if isinstance(item, Operand):
            return self._stand_in(item)
        if isinstance(item, torch.dtype):
            return int(DTYPES[item])
        if isinstance(item, torch.device | torch.memory_format | torch.layout):
            return str(item)
        if isinstance(item, torch.SymInt):
            raise NotLowerable("torchlib: a size that changes")
        return item

    def _stand_in(self, operand: Operand) -> ir.Value:
        """Return a value with arithmetic, which torchlib needs, in place of one of ours."""
        from torch.onnx._internal.exporter._tensors import SymbolicTensor

        value = SymbolicTensor(self._opset, name=operand.value.name)
        describe(value, operand.fake)
        self._stand_ins[value] = operand.value
        return value

    def _nodes(self, nodes: list[ir.Node]) -> Iterator[ir.Node]:
        for node in nodes:
            for index, value in enumerate(node.inputs):
                node.replace_input_with(index, self._unwrapped(value))
            yield node

    def _unwrapped(self, value: Any) -> Any:
        """Return the value of our graph behind a stand-in; other values are new."""
        return self._stand_ins.get(value, value)


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).splitlines()[0][:200]
