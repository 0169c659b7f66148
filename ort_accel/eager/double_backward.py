"""Gives gradients that can be differentiated (`create_graph=True`), for a gradient penalty or a Hessian.

A compiled backward has no backward. So the captured graph runs a second time in eager mode, with the random numbers of
its call, and autograd differentiates that run as often as it likes. Private to torch; checked with torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node

from ort_accel.capture.unused_outputs import backward_nodes
from ort_accel.eager.rerun import EagerRerun
from ort_accel.eager.run_eager import eager_function
from ort_accel.errors import OrtAccelError

Gradients = Sequence[Tensor | None]

UNMATCHED = (
    "a backward with create_graph=True goes through a graph that returns views of its outputs or changes its inputs, "
    "and cannot be run in eager mode; call ort_accel.restore(model) before such a training"
)

CHANGED = (
    "weights or inputs were changed in place between a call and its backward with create_graph=True; run the backward "
    "before they change"
)


class DoubleBackward:
    """A compiled graph whose backward gives differentiable gradients where these are asked for."""

    def __init__(self, run: Callable[..., Any], module: fx.GraphModule, on_run: Callable[[], None]) -> None:
        """`module` is the graph as it was captured. `run` may take more inputs behind those of the graph; `on_run` is
        called when a backward runs in eager mode."""
        self._run, self._eager, self._on_run = run, eager_function(module), on_run
        self._inputs = len(module.graph.find_nodes(op="placeholder"))

    def __call__(self, *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*arguments)
        inputs = arguments[: self._inputs]
        rerun = EagerRerun(self._eager, inputs, self._on_run)
        outputs = self._run(*arguments)
        node = next(backward_nodes(outputs, arguments), None)
        if node is not None:
            output_of = {item.output_nr: index for index, item in enumerate(outputs) if _belongs_to(item, node)}
            node.register_hook(_EagerGradients(rerun, inputs, output_of, node.next_functions))
        return outputs


def _belongs_to(item: object, node: Node) -> bool:
    return isinstance(item, Tensor) and item.grad_fn is node


class _EagerGradients:
    """A hook behind the backward of one call that gives eager mode's gradients, if they are to have gradients."""

    def __init__(
        self,
        rerun: EagerRerun,
        inputs: Sequence[object],
        output_of: dict[int, int],
        edges: Sequence[tuple[Node | None, int]],
    ) -> None:
        """`output_of` has the graph's output for each output of the autograd node."""
        self._rerun: EagerRerun | None = rerun
        self._output_of, self._edges = output_of, edges
        self._inputs = [item for item in inputs if isinstance(item, Tensor) and item.requires_grad]

    def __call__(self, gradients: Gradients, incoming: Gradients) -> tuple[Tensor | None, ...] | None:
        if not torch.is_grad_enabled():
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                self._rerun, self._inputs = None, []  # frees memory: no other backward follows
            return None
        assert self._rerun is not None
        input_of = {_edge(item): item for item in self._inputs}
        sources = [input_of.get(edge) for edge in self._edges]
        used = {index: gradient for index, gradient in enumerate(incoming) if gradient is not None}
        unmatched = [gradient for source, gradient in zip(sources, gradients, strict=True) if source is None]
        if not used.keys() <= self._output_of.keys() or any(gradient is not None for gradient in unmatched):
            raise OrtAccelError(UNMATCHED)
        if self._rerun.given is not None and self._rerun.given.has_changed:
            raise OrtAccelError(CHANGED)
        results = self._rerun.results()
        outputs = [results[self._output_of[index]] for index in used]
        wanted = [source for source in sources if source is not None]
        found = iter(torch.autograd.grad(outputs, wanted, list(used.values()), create_graph=True, allow_unused=True))
        return tuple(None if source is None else next(found) for source in sources)


def _edge(item: Tensor) -> tuple[Node | None, int]:
    """Return the pair by which `next_functions` of an autograd node name a tensor."""
    edge = torch.autograd.graph.get_gradient_edge(item)
    return edge.node, edge.output_nr
