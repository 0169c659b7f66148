"""Cuts segments of a backward graph so that gradients leave it in groups, and finds where each may leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import fx

from ort_accel.graph.nodes import fakes_in, is_getitem, is_size, returned
from ort_accel.graph.symbolic_sizes import hinted_elements
from ort_accel.partition.segments import Cut, body_of

GRADIENT_GROUPS = 8
"""Gradients leave a backward in about so many groups, so that few of them exist at once."""


@dataclass(frozen=True)
class GradientSource:
    """The input of the forward that a gradient belongs to."""

    edge: int
    """The position among the inputs of the forward."""
    inputs: frozenset[str]
    """Inputs of the backward graph that share its memory, which may change only when all have been read."""


Gradients = Sequence[GradientSource | None]
"""The source of each output of a backward graph; None for an output that is no gradient."""


def split_at_gradients(cuts: Sequence[Cut], graph: fx.Graph, free: set[fx.Node], gradients: Gradients) -> list[Cut]:
    """Cuts segments that make many gradients into several."""
    sizes: Counter[fx.Node] = Counter()
    for _, values in _leaving(graph, gradients, free):
        for node in values:
            sizes[_operator(node)] += sum(map(hinted_elements, fakes_in(node.meta["val"])))
    most_elements = sizes.total() / GRADIENT_GROUPS
    return [piece for item in cuts for piece in _pieces(item, sizes, most_elements)]


def _pieces(item: Cut, sizes: Counter[fx.Node], most_elements: float) -> Iterable[Cut]:
    piece: list[fx.Node] = []
    elements = 0
    for node in item.nodes:
        piece.append(node)
        elements += sizes[node]
        if elements and elements >= most_elements:
            yield Cut(item.runner, piece)
            piece, elements = [], 0
    if piece:
        yield Cut(item.runner, piece)


def gradients_by_step(
    graph: fx.Graph,
    gradients: Gradients,
    free: set[fx.Node],
    steps: Sequence[tuple[Sequence[int], Sequence[int]]],
    register: Callable[[fx.Node], int],
) -> dict[int, list[int]]:
    """Returns the step after which outputs may leave, and their positions.

    No later step reads their memory or their parameter's. A step is given as the registers that it reads and writes.
    """
    inputs = {node.name: register(node) for node in graph.find_nodes(op="placeholder")}
    leaving: dict[int, list[int]] = {}
    for position, values in _leaving(graph, gradients, free):
        written = set(map(register, values))
        source = gradients[position]
        assert source is not None
        read = written | {inputs[name] for name in source.inputs if name in inputs}
        after = max(at for at, (reads, writes) in enumerate(steps) if written & set(writes) or read & set(reads))
        leaving.setdefault(after, []).append(position)
    return leaving


def _leaving(graph: fx.Graph, gradients: Gradients, free: set[fx.Node]) -> list[tuple[int, list[fx.Node]]]:
    """Returns the positions of outputs that are gradients, with the values that only this output shares memory with."""
    shared = {
        position: _values_behind(item, free)
        for position, item in enumerate(returned(graph))
        if isinstance(item, fx.Node) and not is_size(item)
    }
    users = Counter(node for nodes in shared.values() for node in nodes)
    return [
        (position, nodes)
        for position, nodes in shared.items()
        if gradients[position] is not None and all(users[node] == 1 and node.op != "placeholder" for node in nodes)
    ]


def _values_behind(node: fx.Node, free: set[fx.Node]) -> list[fx.Node]:
    return [item for item in body_of([], [node], free).inputs if not is_size(item)]


def _operator(node: fx.Node) -> fx.Node:
    return cast("fx.Node", node.args[0]) if is_getitem(node) else node
