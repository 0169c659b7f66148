"""Gradients that eager mode would not give.

To autograd a compiled graph is one node. What a loss does not use of its outputs it takes for zeros, and so it gives
zeros to parameters on which only these outputs depend. In eager mode they have no gradient, and an optimizer leaves
them alone; weight decay would shrink them by what looks like a gradient.

AOTAutograd's names for the inputs and outputs of its graphs are private to torch; checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import TangentAOTInput

from ort_accel.graph.nodes import returned

NODE = "CompiledFunctionBackward"
"""What autograd calls the node of a graph that AOTAutograd compiled."""


@dataclass(frozen=True)
class Partial:
    """A gradient that does not come from all of a graph's outputs."""

    edge: int
    """Its place among the tensors that the graph is called with."""
    tensors: int
    """How many these are."""
    outputs: frozenset[int]
    """The places of the outputs that it comes from."""


def partial_gradients(joint: fx.Graph, outputs: int) -> list[Partial]:
    """The gradients of a joint graph that come from some of its outputs only; the forward has so many outputs.

    It is an empty list where a gradient comes in for something that is not described as an output.
    """
    inputs = joint.find_nodes(op="placeholder")
    place = {name: place for place, name in enumerate(joint.output_node().meta.get("desc", ())[:outputs])}
    tangents = {node: place.get(node.meta["desc"].output) for node in inputs if _is_tangent(node)}
    sources = _sources(joint, tangents)
    everything = frozenset(tangents.values())
    given = [node for node in inputs if node not in tangents]
    gradients = returned(joint)[outputs:]
    if None in everything or len(given) != len(gradients):
        return []
    tensors = [index for index, node in enumerate(given) if isinstance(node.meta.get("val"), Tensor)]
    found = [(edge, gradients[index]) for edge, index in enumerate(tensors)]
    reached = [(edge, sources[node]) for edge, node in found if isinstance(node, fx.Node)]
    return [Partial(edge, len(tensors), places) for edge, places in reached if places and places != everything]


def _is_tangent(node: fx.Node) -> bool:
    return isinstance(node.meta.get("desc"), TangentAOTInput)


def _sources(joint: fx.Graph, tangents: dict[fx.Node, int | None]) -> dict[fx.Node, frozenset[Any]]:
    """For each node the outputs whose gradients it is computed from."""
    sources: dict[fx.Node, frozenset[Any]] = {}
    for node in joint.nodes:
        own = {tangents[node]} if node in tangents else ()
        sources[node] = frozenset().union(own, *(sources[item] for item in node.all_input_nodes))
    return sources


class WithoutUnused:
    """A compiled graph that gives a gradient only where a loss used what it comes from."""

    def __init__(self, run: Callable[..., Any], partial: Sequence[Partial]) -> None:
        self._run, self._partial = run, partial

    def __call__(self, *inputs: Any) -> Any:
        outputs = self._run(*inputs)
        node = next(nodes_of(outputs, inputs), None)
        if node is not None:
            targets = node.next_functions
            partial = [(item, targets[item.edge][0]) for item in self._partial if item.tensors == len(targets)]
            node.register_hook(_LeaveOut(partial))
        return outputs


def nodes_of(outputs: Sequence[Any], inputs: Sequence[Any]) -> Iterator[Any]:
    """The node of a graph that was just called, as often as an output belongs to it."""
    before = {id(item.grad_fn) for item in inputs if isinstance(item, Tensor)}
    for item in outputs:
        node = item.grad_fn if isinstance(item, Tensor) else None
        if type(node).__name__ == NODE and id(node) not in before:
            yield node


class _LeaveOut:
    """Takes away, behind the backward of one call, what was computed from zeros."""

    def __init__(self, partial: Sequence[tuple[Partial, Any]]) -> None:
        """Each of them with the node of autograd that its gradient goes to."""
        self._partial = partial

    def __call__(self, given: Sequence[Tensor | None], came: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        used = {place for place, gradient in enumerate(came) if gradient is not None}
        left = list(given)
        for item, target in self._partial:
            if not item.outputs & used and not _is_watched(target):
                left[item.edge] = None
        return tuple(left)


def _is_watched(target: Any) -> bool:
    """Whether it goes to a parameter with hooks, which autograd would call without a gradient; eager mode does not."""
    parameter = getattr(target, "variable", None)
    return parameter is not None and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
