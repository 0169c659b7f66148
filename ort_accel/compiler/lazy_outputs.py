"""Graphs that leave out what nobody is known to read of a training step, such as the scores beside a loss.

An output with a gradient costs more than its memory: autograd makes zeros for a gradient that nobody gave, and the
backward adds them. For the scores of 1,024 tokens and 16,000 words that is 62 MiB, filled, read and added in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ort_accel.eager.held_outputs import KeptOutputs
from ort_accel.eager.rerun import EagerAgain
from ort_accel.eager.run_eager import in_eager
from ort_accel.graph.nodes import returned
from ort_accel.graph.requires_grad import has_gradient
from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource, expression
from ort_accel.row_skipping.row_flow import value_of
from ort_accel.runtime.lazy_tensor import UnreadTensor


@dataclass(frozen=True)
class Unread:
    """The outputs of a graph that are not computed unless somebody reads them."""

    traced: fx.GraphModule | None = None
    positions: frozenset[int] = frozenset()

    @contextmanager
    def left_out_of(self, module: fx.GraphModule) -> Iterator[None]:
        """For as long as it takes to compile the graph as it was captured, it gives None in their places."""
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

    def stood_in_for(
        self,
        run: Callable[..., Any],
        module: fx.GraphModule,
        was_read: Callable[[], None],
        kept: KeptOutputs | None,
    ) -> Callable[..., Any]:
        """The compiled graph with stand-ins for them. `was_read` is told of the first that had to compute itself;
        without `kept`, which keeps what they are computed from, none can be read after the weights have changed."""
        if self.traced is None or not self.positions:
            return run
        return LossOnly(run, module, self.traced.graph, self.positions, was_read, kept)


class LossOnly:
    """A compiled graph without some outputs. Each call gives stand-ins for them, which compute themselves if read."""

    def __init__(
        self,
        run: Callable[..., Any],
        module: fx.GraphModule,
        traced: fx.Graph,
        unread: frozenset[int],
        was_read: Callable[[], None],
        kept: KeptOutputs | None,
    ) -> None:
        """`module` is the graph as it was captured, `traced` its operators."""
        self._run, self._eager, self._was_read, self._kept = run, in_eager(module), was_read, kept
        self._forms = _Forms(traced, unread)
        self._inputs = len(traced.find_nodes(op="placeholder"))

    def __call__(self, *arguments: Any) -> list[Any]:
        """`arguments` are the graph's inputs, and the tables of the batch if the graph takes those."""
        inputs = arguments[: self._inputs]
        again = EagerAgain(self._eager, inputs, self._was_read)
        results = list(self._run(*arguments))
        if self._kept is not None:
            self._kept.add(again, results, inputs)
        return self._forms.fill(results, inputs, again)


class _Forms:
    """The sizes and types of the outputs that are not computed."""

    def __init__(self, traced: fx.Graph, unread: frozenset[int]) -> None:
        self._symbols = SymbolSource()
        for position, node in enumerate(traced.find_nodes(op="placeholder")):
            self._symbols.learn(position, node.meta.get("val"))
        outputs = returned(traced)
        nodes = [(position, outputs[position]) for position in sorted(unread)]
        self._unread = [
            (position, node, SizeFunction(map(expression, value_of(node).shape))) for position, node in nodes
        ]

    def fill(self, results: list[Any], inputs: Sequence[Any], again: EagerAgain) -> list[Any]:
        """The outputs with a stand-in for each that was not computed."""
        symbols: dict[str, int] = {}
        self._symbols.read(list(inputs), symbols)
        for position, node, size in self._unread:
            fake, gradient = value_of(node), has_gradient(node) and torch.is_grad_enabled()
            make = again.output(position)
            results[position] = UnreadTensor(size(symbols), fake.dtype, fake.device, make, requires_grad=gradient)
        return results
