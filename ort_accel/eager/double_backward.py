"""Gradients that are differentiated once more: `create_graph=True`, for a gradient penalty or a Hessian.

A compiled backward has no backward of its own. So the gradients of such a step come from the captured graph, which runs
once more in eager mode with the random numbers of its call, and autograd differentiates that as often as it likes.
It uses what is private to torch; checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.capture.unused_outputs import nodes_of
from ort_accel.eager.rerun import EagerAgain
from ort_accel.eager.run_eager import in_eager
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


class Differentiable:
    """A compiled graph whose backward gives gradients that can be differentiated, where that is asked for."""

    def __init__(self, run: Callable[..., Any], module: fx.GraphModule, told: Callable[[], None]) -> None:
        """`module` is the graph as it was captured. `run` may take more inputs behind those of the graph; `told` is
        called when a backward runs in eager mode."""
        self._run, self._eager, self._told = run, in_eager(module), told
        self._inputs = len(module.graph.find_nodes(op="placeholder"))

    def __call__(self, *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*arguments)
        inputs = arguments[: self._inputs]
        again = EagerAgain(self._eager, inputs, self._told)
        outputs = self._run(*arguments)
        node = next(nodes_of(outputs, arguments), None)
        if node is not None:
            places = {item.output_nr: at for at, item in enumerate(outputs) if _belongs_to(item, node)}
            node.register_hook(_InEager(again, inputs, places, node.next_functions))
        return outputs


def _belongs_to(item: Any, node: Any) -> bool:
    return isinstance(item, Tensor) and item.grad_fn is node


class _InEager:
    """Takes, behind the backward of one call, the gradients that eager mode gives, if they are to have gradients."""

    def __init__(self, again: EagerAgain, inputs: Sequence[Any], places: dict[int, int], edges: Sequence[Any]) -> None:
        """`places` tells for outputs of autograd's node which outputs of the graph they are."""
        self._again: EagerAgain | None = again
        self._places, self._edges = places, edges
        self._inputs = [item for item in inputs if isinstance(item, Tensor) and item.requires_grad]

    def __call__(
        self, given: Sequence[Tensor | None], came: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...] | None:
        if not torch.is_grad_enabled():
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                self._again, self._inputs = None, []  # no other backward follows, so memory is let go
            return None
        assert self._again is not None
        found = {_edge(item): item for item in self._inputs}
        sources = [found.get(edge) for edge in self._edges]
        used = {at: gradient for at, gradient in enumerate(came) if gradient is not None}
        lost = [gradient for source, gradient in zip(sources, given, strict=True) if source is None]
        if not used.keys() <= self._places.keys() or any(gradient is not None for gradient in lost):
            raise OrtAccelError(UNMATCHED)
        if self._again.given is not None and self._again.given.has_changed:
            raise OrtAccelError(CHANGED)
        results = self._again.results()
        outputs = [results[self._places[at]] for at in used]
        wanted = [source for source in sources if source is not None]
        gradients = iter(
            torch.autograd.grad(outputs, wanted, list(used.values()), create_graph=True, allow_unused=True)
        )
        return tuple(None if source is None else next(gradients) for source in sources)


def _edge(item: Tensor) -> tuple[Any, int]:
    """What autograd's nodes name as the source of a gradient's way to a tensor."""
    edge = torch.autograd.graph.get_gradient_edge(item)
    return edge.node, edge.output_nr
