"""Gradients on their way out of a backward graph: where they may leave, and cutting segments so that they can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import fx

from ort_accel.graph.nodes import fakes_in, is_part, is_size, returned
from ort_accel.graph.symbolic_sizes import hinted_elements
from ort_accel.partition.segments import Cut, body_of

GROUPS = 8
"""Gradients leave a backward in about so many groups, so that not much more than an eighth of them exists at once."""


@dataclass(frozen=True)
class Source:
    """What a gradient belongs to: one of the tensors that the forward was called with."""

    edge: int
    """Its place among these tensors."""
    inputs: frozenset[str]
    """Inputs of the backward graph that look at its memory: it may change only when all have been read."""


Gradients = Sequence[Source | None]
"""For each output of a backward graph what it is the gradient of, if it is one."""


def split(cuts: Sequence[Cut], graph: fx.Graph, free: set[fx.Node], gradients: Gradients) -> list[Cut]:
    """Cut segments that make many gradients into several."""
    sizes: Counter[fx.Node] = Counter()
    for _, looked_at in _leaving(graph, gradients, free):
        for node in looked_at:
            sizes[_operator(node)] += sum(map(hinted_elements, fakes_in(node.meta["val"])))
    most = sizes.total() / GROUPS
    return [piece for item in cuts for piece in _pieces(item, sizes, most)]


def _pieces(item: Cut, sizes: Counter[fx.Node], most: float) -> Iterable[Cut]:
    piece: list[fx.Node] = []
    made = 0
    for node in item.nodes:
        piece.append(node)
        made += sizes[node]
        if made and made >= most:
            yield Cut(item.runner, piece)
            piece, made = [], 0
    if piece:
        yield Cut(item.runner, piece)


def due(
    graph: fx.Graph,
    gradients: Gradients,
    free: set[fx.Node],
    steps: Sequence[tuple[Sequence[int], Sequence[int]]],
    register: Callable[[fx.Node], int],
) -> dict[int, list[int]]:
    """After which step which outputs, by position, may leave: nothing reads their memory or their parameter's then.

    A step is the registers that it reads, and those that it writes.
    """
    inputs = {node.name: register(node) for node in graph.find_nodes(op="placeholder")}
    leaving: dict[int, list[int]] = {}
    for position, looked_at in _leaving(graph, gradients, free):
        made = set(map(register, looked_at))
        source = gradients[position]
        assert source is not None
        read = made | {inputs[name] for name in source.inputs if name in inputs}
        after = max(at for at, (reads, writes) in enumerate(steps) if made & set(writes) or read & set(reads))
        leaving.setdefault(after, []).append(position)
    return leaving


def _leaving(graph: fx.Graph, gradients: Gradients, free: set[fx.Node]) -> list[tuple[int, list[fx.Node]]]:
    """The outputs that are gradients made here, with the values whose memory they look at and no other output does."""
    seen = {
        position: _looked_at(item, free)
        for position, item in enumerate(returned(graph))
        if isinstance(item, fx.Node) and not is_size(item)
    }
    users = Counter(node for nodes in seen.values() for node in nodes)
    return [
        (position, nodes)
        for position, nodes in seen.items()
        if gradients[position] is not None and all(users[node] == 1 and node.op != "placeholder" for node in nodes)
    ]


def _looked_at(node: fx.Node, free: set[fx.Node]) -> list[fx.Node]:
    return [item for item in body_of([], [node], free).inputs if not is_size(item)]


def _operator(node: fx.Node) -> fx.Node:
    return cast("fx.Node", node.args[0]) if is_part(node) else node
