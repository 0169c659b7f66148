"""Which ATen operators can be written in ONNX, and how. Each family in `ops/` adds its own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

from ort_accel.lowering.onnx_graph import OnnxGraph
from ort_accel.lowering.torchlib_fallback import tail

Lowering = Callable[..., Any]
"""Called with the graph and the node's arguments, tensors as `Operand`; returns one `ir.Value`, or a tuple of values
(None for an output that nobody may read). Raises `NotLowerable` to refuse."""

_LOWERINGS: dict[Any, Lowering] = {}


def lowers(*targets: Any) -> Callable[[Lowering], Lowering]:
    """Register a function as the lowering of ATen operators."""

    def register(function: Lowering) -> Lowering:
        for target in targets:
            assert target not in _LOWERINGS, f"{target} is lowered twice"
            _LOWERINGS[target] = function
        return function

    return register


@cache
def lowerings() -> dict[Any, Lowering]:
    """All lowerings, by operator overload."""
    from ort_accel.lowering import ops

    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")
    return tail() | _LOWERINGS


def lower(graph: OnnxGraph, target: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any, ...]:
    """Write one operator; always a tuple of outputs."""
    graph.result = result
    outputs = lowerings()[target](graph, *args, **kwargs)
    return outputs if isinstance(outputs, tuple) else (outputs,)
