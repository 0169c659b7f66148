"""The lowerings of ATen operators to ONNX. Each family in `ops/` registers its own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from torch._ops import OpOverload

from ort_accel.lowering.onnx_graph import OnnxGraph
from ort_accel.lowering.term import Term
from ort_accel.lowering.torchlib_fallback import torchlib_lowerings

Lowering = Callable[..., Any]
"""Takes the graph and the node's arguments, tensors as `Operand`; returns one value or term, or a tuple of them, with
None for an output that nobody may read. Raises `NotLowerable` to refuse."""

F = TypeVar("F", bound=Lowering)

_LOWERINGS: dict[OpOverload[..., Any], Lowering] = {}


def lowers(*targets: OpOverload[..., Any]) -> Callable[[F], F]:
    """Register a function as the lowering of ATen operators."""

    def register(function: F) -> F:
        for target in targets:
            assert target not in _LOWERINGS, f"{target} is lowered twice"
            _LOWERINGS[target] = function
        return function

    return register


@cache
def lowerings() -> dict[OpOverload[..., Any], Lowering]:
    """Return all lowerings, by operator overload."""
    from ort_accel.lowering import ops

    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")
    return torchlib_lowerings() | _LOWERINGS


def lower(graph: OnnxGraph, target: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any, ...]:
    """Write one operator, and return its outputs."""
    graph.result = result
    outputs = lowerings()[target](graph, *args, **kwargs)
    given = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(item.value if isinstance(item, Term) else item for item in given)
