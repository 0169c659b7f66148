"""The forward graph before autograd: a small ATen graph, traced from what Dynamo captured.

It uses what is private to torch; checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext
from torch.fx.traceback import preserve_node_meta

from ort_accel.capture.reuse_fake_results import KnownResults
from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource
from ort_accel.row_skipping.pipeline import NothingToSkip

PLAIN = {"use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop"}
"""What a checkpoint may be told that changes none of its numbers: random ones are the same again in any case."""


def breaks_off(module: fx.GraphModule) -> bool:
    """Whether Python goes on after a graph with what it gave, instead of returning it."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return reason is None or reason.graph_break


def _symbols(size: Any) -> set[sympy.Symbol]:
    return size.node._expr.free_symbols if isinstance(size, torch.SymInt) else set()


def own_backwards(module: fx.GraphModule) -> bool:
    """Whether parts of a graph are differentiated, or run again, in a way that tracing would lose."""
    return any(_is_lost(node) for node in module.graph.nodes)


def _is_lost(node: fx.Node) -> bool:
    """Of what is in a checkpointed part all is kept, but not what a script asks to be saved of it."""
    if node.target is not tag_activation_checkpoint:
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    body = operator.attrgetter(node.args[0].target)(node.graph.owning_module)  # type: ignore[union-attr, arg-type]
    return bool(node.kwargs.keys() - PLAIN) or "_checkpoint_context_fn" in body.meta or own_backwards(body)


@dataclass(frozen=True)
class Conditions:
    """What must be so of the sizes of inputs and tables."""

    source: SymbolSource
    checks: SizeFunction

    def __call__(self, arguments: Sequence[Any]) -> bool:
        """Whether it is."""
        if not self.checks.sizes:
            return True
        values: dict[str, int] = {}
        self.source.read(list(arguments), values)
        return all(self.checks(values))


class Tracer:
    """Traces functions on the fake inputs of a graph that Dynamo captured."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        mode, self._context = detect_fake_mode(inputs), TracingContext.get()
        assert mode is not None
        self._mode = mode
        self._fakes = [self._fake(item) for item in inputs]
        self._tables: list[Tensor] = []

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        context = self._context.tensor_to_context.get(value)  # type: ignore[no-untyped-call]
        source = context.tensor_source if context else None
        return self._mode.from_tensor(value, static_shapes=context is None, symbolic_context=context, source=source)

    def smaller(
        self, module: fx.GraphModule, write: Callable[[Sequence[Any]], Any], tables: Sequence[Tensor]
    ) -> fx.GraphModule:
        """The graph that `write` writes from the inputs and the tables, in the place of the one that was captured."""
        self._tables = [self.table(f"rows_{number}", table) for number, table in enumerate(tables)]
        smaller = self.trace(lambda *arguments: write(arguments), self._tables)
        smaller.meta = module.meta
        sources: Any = module._param_name_to_source
        for name, _ in smaller.named_buffers():  # numbers that are stored into tensors
            sources = sources | {name: ConstantSource(name)}
        smaller._param_name_to_source = sources
        sources = iter(module.graph.find_nodes(op="placeholder"))
        for node in smaller.graph.find_nodes(op="placeholder"):
            source = next(sources, None)
            node._dynamo_source = getattr(source, "_dynamo_source", None)
            if source is not None and "tensor_dict" in source.meta:
                node.meta["tensor_dict"] = source.meta["tensor_dict"]
        return smaller

    def conditions(self) -> Conditions:
        """What was found out about the tables while graphs were compiled, as a check of inputs and tables.

        Dynamo, which checks all else before it calls a graph, has never heard of the tables, so it is not told.
        """
        shapes = self._mode.shape_env
        assert shapes is not None
        own = {symbol for fake in self._tables for size in fake.shape for symbol in _symbols(size)}
        mine = [guard for guard in shapes.guards if guard.expr.free_symbols & own]
        shapes.guards[:] = [guard for guard in shapes.guards if not guard.expr.free_symbols & own]
        source = SymbolSource()
        for position, fake in enumerate([*self._fakes, *self._tables]):
            source.learn(position, fake)
        return Conditions(source, SizeFunction(sympy.Piecewise((1, guard.expr), (0, True)) for guard in mine))

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
        return self._mode.from_tensor(value, symbolic_context=context, source=source)

    def trace(self, function: Callable[..., Any], more: Sequence[Tensor] = ()) -> fx.GraphModule:
        """The graph of a function of the inputs and the tables; a graph's own nodes keep their lines of code."""
        table = None
        if isinstance(function, fx.GraphModule):
            run = KnownResults(function, self._mode)
            function, table = run.run, run.table
        with self._mode, enable_python_dispatcher(), preserve_node_meta():
            traced = make_fx(function, table, "real", pre_dispatch=True)(*self._fakes, *more)
        if any(isinstance(value, FakeTensor) for _, value in traced.named_buffers()):
            raise NothingToSkip("a tensor in it is made in a way that tracing does not see")
        return traced
