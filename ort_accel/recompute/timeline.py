"""What is alive at each moment of a training step, and the moment at which that is most.

The forward and the backward are followed segment by segment, since a segment of ONNX Runtime holds all that it was
given until it has ended, while PyTorch lets go of each value behind its last reader. Sizes are those that the graph was
captured with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from ort_accel.lowering.nodes import fakes_in, is_part, is_size, is_view, returned, tensors_of, writes
from ort_accel.lowering.segments import Cut
from ort_accel.recompute.graph import hinted_bytes, is_tensor, owner
from ort_accel.reporting import Runner

Cutter = Callable[[fx.GraphModule], list[Cut]]
"""Tells into which segments a graph would be cut. It may change the graph that it is given."""

Live = dict[str, int]
"""Names of values that own memory, and their bytes."""


@dataclass(frozen=True)
class Moment:
    """One moment of a step."""

    graph: str
    """`forward` or `backward`."""
    live: Mapping[str, int]
    """What was computed and is still there. Inputs of the forward are not among it."""
    bytes: int


@dataclass
class Timeline:
    """A step, seen by its memory."""

    resident: int
    """Bytes that are there all the time: parameters, buffers, inputs, and what the optimizer keeps for parameters."""
    moments: list[Moment] = field(default_factory=list)
    """The highest moment of each segment, in the order of running."""

    @property
    def highest(self) -> Moment:
        """The moment at which most is alive."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def peak(self) -> int:
        """The most bytes that a step takes in all."""
        return self.resident + self.highest.bytes


STATES = 2
"""Values that an optimizer keeps for each parameter. Nothing knows the optimizer yet; Adam keeps two moments."""


def timeline(forward: fx.GraphModule, backward: fx.GraphModule, wanted: int, cutter: Cutter) -> Timeline:
    """A step of these graphs, which are changed. Of what the forward gives, the first `wanted` outputs are the caller's
    and stay; the others are kept for the backward."""
    given = forward.graph.find_nodes(op="placeholder")
    kept = [owner(node).name if isinstance(node, fx.Node) else "" for node in returned(forward.graph)]
    step = Timeline(_resident(given, backward.graph))
    live: Live = {}
    step.moments += _moments("forward", forward, live, cutter(forward))
    passed = [node for node in backward.graph.find_nodes(op="placeholder") if is_tensor(node)]
    alias = dict(zip((node.name for node in passed), kept[wanted:], strict=False))
    alias |= {node.name: owner(node).name for node in returned(forward.graph) if isinstance(node, fx.Node)}
    inputs = {node.name for node in given}
    tangents = [node for node in passed if alias.get(node.name, node.name) not in live.keys() | inputs]
    live |= {node.name: _bytes(node) for node in tangents}
    step.moments += _moments("backward", backward, live, cutter(backward), alias, set(kept[:wanted]))
    return step


def _resident(given: Iterable[fx.Node], backward: fx.Graph) -> int:
    """The inputs, and the states for those parameters that get a gradient: each leads to one output of the backward."""
    inputs = list(given)
    trained = [node for node, gradient in zip(inputs, returned(backward), strict=False) if gradient is not None]
    return sum(map(_bytes, inputs)) + STATES * sum(map(_bytes, trained))


def _moments(
    name: str,
    module: fx.GraphModule,
    live: Live,
    cuts: list[Cut],
    alias: Mapping[str, str] | None = None,
    lasting: Collection[str] = (),
) -> Iterator[Moment]:
    """The highest moment of each segment. `live` is what is alive before and, when all was taken, afterwards."""
    names = alias or {}

    def memory(node: fx.Node) -> str:
        own = owner(node).name
        return names.get(own, own)

    stays = {memory(node) for node in returned(module.graph) if isinstance(node, fx.Node)} | set(lasting)
    last = {memory(item): cut for cut in cuts for node in cut.nodes for item in _read(node)}
    _forget(live, [own for own in live if own not in last and own not in stays])
    for cut in cuts:
        inside = {memory(item): node for node in cut.nodes for item in _read(node)}
        given = set(live) if cut.runner is Runner.ORT else set()
        highest = Moment(name, dict(live), sum(live.values()))
        now = highest.bytes
        for node in cut.nodes:
            for made in _made(node):
                live[made.name] = _bytes(made)
                now += live[made.name]
            if now > highest.bytes:
                highest = Moment(name, dict(live), now)
            over = {memory(item) for item in [*_read(node), *_made(node)]} - stays - given
            now -= _forget(live, [own for own in over if last.get(own, cut) is cut and inside.get(own, node) is node])
        _forget(live, [own for own in given if last.get(own) is cut and own not in stays])
        yield highest


def _read(node: fx.Node) -> Iterable[fx.Node]:
    return (item for item in node.all_input_nodes if not is_size(item))


def _made(node: fx.Node) -> Iterable[fx.Node]:
    """The values that a node computes into memory of their own."""
    return [] if is_view(node) or is_part(node) or writes(node) else tensors_of(node)


def _bytes(node: fx.Node) -> int:
    return sum(map(hinted_bytes, fakes_in(node.meta.get("val"))))


def _forget(live: Live, names: Iterable[str]) -> int:
    """Take these values away; returns how many bytes that frees."""
    return sum(live.pop(name, 0) for name in names)
