"""Removes zero gradients that eager mode would not give.

To autograd a compiled graph is one node. Autograd takes the gradients of unused outputs for zeros, so parameters on
which only these outputs depend get zeros. In eager mode they get None, and no weight decay from the optimizer.

AOTAutograd's names for the inputs and outputs of its graphs are private to torch; checked with torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch.autograd.graph import Node

from ort_accel.graph.nodes import returned

BACKWARD_NODE = "CompiledFunctionBackward"
"""The name of the autograd node of a graph that AOTAutograd compiled."""


@dataclass(frozen=True)
class PartialGradient:
    """A gradient that depends on some of a graph's outputs only."""

    edge: int
    """Its index among the tensors that the graph is called with."""
    tensors: int
    """The number of these tensors."""
    outputs: frozenset[int]
    """Indices of the outputs that it depends on."""


def partial_gradients(joint: fx.Graph, outputs: int) -> list[PartialGradient]:
    """Return the gradients of a joint graph that depend on some `outputs` only; none if one is not described."""
    inputs = joint.find_nodes(op="placeholder")
    index_of = {name: index for index, name in enumerate(joint.output_node().meta.get("desc", ())[:outputs])}
    described = [(node, node.meta.get("desc")) for node in inputs]
    tangents = {node: index_of.get(desc.output) for node, desc in described if isinstance(desc, TangentAOTInput)}
    known = {node: index for node, index in tangents.items() if index is not None}
    primals = [node for node in inputs if node not in tangents]
    gradients = returned(joint)[outputs:]
    if len(known) != len(tangents) or len(primals) != len(gradients):
        return []
    sources, everything = _sources(joint, known), frozenset(known.values())
    tensors = [index for index, node in enumerate(primals) if isinstance(node.meta.get("val"), Tensor)]
    found = [(edge, gradients[index]) for edge, index in enumerate(tensors)]
    reached = [(edge, sources[node]) for edge, node in found if isinstance(node, fx.Node)]
    return [
        PartialGradient(edge, len(tensors), indices) for edge, indices in reached if indices and indices != everything
    ]


def _sources(joint: fx.Graph, tangents: dict[fx.Node, int]) -> dict[fx.Node, frozenset[int]]:
    """Return for each node the outputs whose gradients it is computed from."""
    sources: dict[fx.Node, frozenset[int]] = {}
    for node in joint.nodes:
        direct = {tangents[node]} if node in tangents else set()
        sources[node] = frozenset(direct.union(*(sources[item] for item in node.all_input_nodes)))
    return sources


class WithoutUnusedGradients:
    """A compiled graph that gives a partial gradient only if the loss used one of its outputs."""

    def __init__(self, run: Callable[..., Any], partial: Sequence[PartialGradient]) -> None:
        self._run, self._partial = run, partial

    def __call__(self, *inputs: Any) -> Any:
        outputs = self._run(*inputs)
        node = next(backward_nodes(outputs, inputs), None)
        if node is not None:
            targets = node.next_functions
            partial = [(item, targets[item.edge][0]) for item in self._partial if item.tensors == len(targets)]
            node.register_hook(_DropUnused(partial))
        return outputs


def backward_nodes(outputs: Sequence[object], inputs: Sequence[object]) -> Iterator[Node]:
    """Yield the autograd node of a graph that was just called, once for each output that belongs to it."""
    before = {id(item.grad_fn) for item in inputs if isinstance(item, Tensor)}
    for item in outputs:
        node = item.grad_fn if isinstance(item, Tensor) else None
        if node is not None and type(node).__name__ == BACKWARD_NODE and id(node) not in before:
            yield node


class _DropUnused:
    """A hook behind the backward of one call that drops gradients which were computed from zeros."""

    def __init__(self, partial: Sequence[tuple[PartialGradient, Node | None]]) -> None:
        """`partial` has each gradient with the autograd node that it goes to."""
        self._partial = partial

    def __call__(
        self, gradients: Sequence[Tensor | None], incoming: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        used = {index for index, gradient in enumerate(incoming) if gradient is not None}
        kept = list(gradients)
        for item, target in self._partial:
            if not item.outputs & used and not _has_hooks(target):
                kept[item.edge] = None
        return tuple(kept)


def _has_hooks(target: Node | None) -> bool:
    """True if a gradient goes to a parameter with hooks, which autograd would call with None, unlike eager mode."""
    parameter = getattr(target, "variable", None)
    return parameter is not None and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
