"""Graphs of training steps without the outputs that nobody is known to read, such as the logits beside a loss.

Each such output becomes a lazy tensor, which computes itself if the script reads it. An output with a gradient costs
more than its memory: autograd fills a missing gradient with zeros, and the backward adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx

from ort_accel.eager.held_outputs import HeldOutputs
from ort_accel.eager.rerun import EagerRerun
from ort_accel.eager.run_eager import eager_function
from ort_accel.graph.nodes import returned
from ort_accel.graph.requires_grad import has_gradient
from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource, expression
from ort_accel.row_skipping.row_flow import value_of
from ort_accel.runtime.lazy_tensor import LazyTensor


@dataclass(frozen=True)
class LazyOutputs:
    """The outputs of a graph that are computed only when they are read."""

    traced: fx.GraphModule | None
    positions: frozenset[int]

    @contextmanager
    def left_out_of(self, module: fx.GraphModule) -> Iterator[None]:
        """Have a captured graph return None in their positions, while the context is entered."""
        if not self.positions:
            yield
            return
        output = module.graph.output_node()
        before = output.args
        output.args = (tuple(None if at in self.positions else x for at, x in enumerate(returned(module.graph))),)
        module.recompile()
        try:
            yield
        finally:
            output.args = before
            module.recompile()

    def added_to(
        self,
        run: Callable[..., Sequence[object]],
        module: fx.GraphModule,
        was_read: Callable[[], None],
        held: HeldOutputs | None,
    ) -> Callable[..., Sequence[object]]:
        """Returns the compiled graph with lazy tensors in their positions.

        `was_read` is called when the first of them computes itself. Without `held`, none can be read once the weights
        have changed.
        """
        if self.traced is None or not self.positions:
            return run
        return WithLazyOutputs(run, module, self.traced.graph, self.positions, was_read, held)


NO_LAZY_OUTPUTS = LazyOutputs(None, frozenset())


class WithLazyOutputs:
    """A compiled graph that does not compute some outputs, and returns lazy tensors for them."""

    def __init__(
        self,
        run: Callable[..., Sequence[object]],
        module: fx.GraphModule,
        traced: fx.Graph,
        lazy: frozenset[int],
        was_read: Callable[[], None],
        held: HeldOutputs | None,
    ) -> None:
        """`module` is the captured graph, `traced` its ATen graph, `lazy` the positions of the lazy outputs."""
        self._run, self._eager, self._was_read, self._held = run, eager_function(module), was_read, held
        self._shapes = _LazyShapes(traced, lazy)
        self._inputs = len(traced.find_nodes(op="placeholder"))

    def __call__(self, *arguments: object) -> list[object]:
        """Run with the graph's inputs, which the tables of the batch follow if the graph takes them."""
        inputs = arguments[: self._inputs]
        rerun = EagerRerun(self._eager, inputs, self._was_read)
        results = list(self._run(*arguments))
        if self._held is not None:
            self._held.add(rerun, results, inputs)
        return self._shapes.fill(results, inputs, rerun)


class _LazyShapes:
    """The shapes and dtypes of lazy outputs."""

    def __init__(self, traced: fx.Graph, lazy: frozenset[int]) -> None:
        self._symbols = SymbolSource()
        for position, node in enumerate(traced.find_nodes(op="placeholder")):
            self._symbols.learn(position, node.meta.get("val"))
        outputs = returned(traced)
        nodes = [(position, outputs[position]) for position in sorted(lazy)]
        self._lazy = [(position, node, SizeFunction(map(expression, value_of(node).shape))) for position, node in nodes]

    def fill(self, results: list[object], inputs: Sequence[object], rerun: EagerRerun) -> list[object]:
        """Returns the results with a lazy tensor for each that was not computed."""
        symbols: dict[str, int] = {}
        self._symbols.read(list(inputs), symbols)
        for position, node, size in self._lazy:
            fake, requires_grad = value_of(node), has_gradient(node) and torch.is_grad_enabled()
            compute = rerun.output(position)
            results[position] = LazyTensor(size(symbols), fake.dtype, fake.device, compute, requires_grad=requires_grad)
        return results
