"""The forward graph before autograd: a small ATen graph, traced from what Dynamo captured; private to torch, checked with 2.13."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext


class Tracer:
    """Traces functions on the fake inputs of a graph that Dynamo captured."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._mode, self._context = detect_fake_mode(inputs), TracingContext.get()
        self._fakes = [self._fake(item) for item in inputs]

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        context = self._context.tensor_to_context.get(value)
        source = context.tensor_source if context else None  # type: ignore[attr-defined]
        return self._mode.from_tensor(
            value, static_shapes=context is None, symbolic_context=context, source=source
        )

    def table(self, name: str, value: Tensor) -> Tensor:
        """A fake for one more input, whose first dimension has a size of its own; the value is its example."""
        source = ConstantSource(name)
        context = StatefulSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (value.ndim - 1)],
            constraint_sizes=[None] * value.ndim,
            tensor_source=source,
            shape_env_to_source_to_symbol_cache={},
        )
        self._context.tensor_to_context[value] = context
        return self._mode.from_tensor(value, symbolic_context=context, source=source)  # type: ignore[no-any-return]

    def trace(self, function: Callable[..., Any], more: Sequence[Tensor] = ()) -> fx.GraphModule:
        """The graph of a function of the inputs and the tables."""
        with self._mode, enable_python_dispatcher():
            return make_fx(function, pre_dispatch=True, tracing_mode="real")(*self._fakes, *more)
