"""Traces what Dynamo captured into the forward graph before autograd: a small ATen graph.

Private to torch; checked with torch 2.11 to 2.14.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import Source, TracingContext, detect_fake_mode
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext
from torch.fx.traceback import preserve_node_meta

from ort_accel.capture.reuse_fake_results import ReusingInterpreter
from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource
from ort_accel.row_skipping.pipeline import NothingToSkip

CHECKPOINT_OPTIONS = {"use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop"}
"""Options of a checkpoint that do not change its results: random numbers are repeated in any case."""


def ends_at_graph_break(module: fx.GraphModule) -> bool:
    """True if a graph ends at a graph break, and Python goes on with its outputs."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return reason is None or reason.graph_break


def _symbols(size: int | torch.SymInt) -> set[sympy.Symbol]:
    return size.node._expr.free_symbols if isinstance(size, torch.SymInt) else set()


def has_lost_backward(module: fx.GraphModule) -> bool:
    """True if tracing would lose how parts of a graph are differentiated or recomputed."""
    return any(_is_lost(node) for node in module.graph.nodes)


def _is_lost(node: fx.Node) -> bool:
    """True for a higher-order operator, but for a checkpoint without a policy of what is saved."""
    if node.target is not tag_activation_checkpoint:
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    body = _body(node)
    return (
        bool(node.kwargs.keys() - CHECKPOINT_OPTIONS)
        or "_checkpoint_context_fn" in body.meta
        or has_lost_backward(body)
    )


def checkpointed_parts(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yields the graphs within the checkpoints of a graph, and within their checkpoints."""
    for node in module.graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
        yield (body := _body(node))
        yield from checkpointed_parts(body)


def _body(checkpoint: fx.Node) -> fx.GraphModule:
    name = cast("fx.Node", checkpoint.args[0]).target
    body: fx.GraphModule = operator.attrgetter(str(name))(checkpoint.graph.owning_module)
    return body


@dataclass(frozen=True)
class Conditions:
    """Conditions on the sizes of inputs and tables under which a graph holds."""

    source: SymbolSource
    checks: SizeFunction

    def __call__(self, arguments: Sequence[Any]) -> bool:
        """True if these inputs and tables meet them."""
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
        """Return the graph that `write` makes from the inputs and the tables, to be compiled instead of `module`."""
        self._tables = [self.table(f"rows_{number}", table) for number, table in enumerate(tables)]
        smaller = self.trace(lambda *arguments: write(arguments), self._tables)
        smaller.meta = module.meta
        parameter_sources = cast("dict[str, Source]", module._param_name_to_source)
        constants = {name: ConstantSource(name) for name, _ in smaller.named_buffers()}
        smaller._param_name_to_source = cast("Any", {**parameter_sources, **constants})
        captured = iter(module.graph.find_nodes(op="placeholder"))
        for node in smaller.graph.find_nodes(op="placeholder"):
            original = next(captured, None)
            node._dynamo_source = getattr(original, "_dynamo_source", None)
            if original is not None and "tensor_dict" in original.meta:
                node.meta["tensor_dict"] = original.meta["tensor_dict"]
        return smaller

    def conditions(self) -> Conditions:
        """Move the guards on sizes of tables, which Dynamo does not know, out of its guards; return them as a check."""
        shapes = self._mode.shape_env
        assert shapes is not None
        symbols = {symbol for fake in self._tables for size in fake.shape for symbol in _symbols(size)}
        of_tables = [guard for guard in shapes.guards if guard.expr.free_symbols & symbols]
        shapes.guards[:] = [guard for guard in shapes.guards if not guard.expr.free_symbols & symbols]
        source = SymbolSource()
        for position, fake in enumerate([*self._fakes, *self._tables]):
            source.learn(position, fake)
        return Conditions(source, SizeFunction(sympy.Piecewise((1, guard.expr), (0, True)) for guard in of_tables))

    def table(self, name: str, value: Tensor) -> Tensor:
        """Return a fake for one more input like this example; its first dimension is dynamic."""
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
        """Return the graph of a function of the inputs and the tables; a graph's nodes keep their lines of code."""
        decompositions = None
        if isinstance(function, fx.GraphModule):
            interpreter = ReusingInterpreter(function, self._mode)
            function, decompositions = interpreter.run, interpreter.decompositions
        with self._mode, enable_python_dispatcher(), preserve_node_meta():
            traced = make_fx(function, decompositions, "real", pre_dispatch=True)(*self._fakes, *more)
        if any(isinstance(value, FakeTensor) for _, value in traced.named_buffers()):
            raise NothingToSkip("a tensor in it is made in a way that tracing does not see")
        return traced
