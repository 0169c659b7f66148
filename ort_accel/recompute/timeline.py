"""What is alive at each moment of a training step, and the moment at which that is most.

The forward and the backward are followed segment by segment, since a segment of ONNX Runtime holds all that it was
given until it has ended, while PyTorch lets go of each value behind its last reader. Sizes are those that the graph was
captured with.

ONNX Runtime and PyTorch have a pool of memory each, which gives back little within a step, and neither uses what the
other one has left. So the peak of a step is the sum of both pools' highest moments, whenever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, product

from torch import fx

from ort_accel.lowering.nodes import fakes_in, is_part, is_size, is_view, returned, tensors_of, writes
from ort_accel.lowering.segments import Cut
from ort_accel.recompute.graph import hinted_bytes, is_tensor, owner
from ort_accel.reporting import Runner

Cutter = Callable[[fx.GraphModule], list[Cut]]
"""Tells into which segments a graph would be cut. It may change the graph that it is given."""


@dataclass(frozen=True)
class Moment:
    """One moment of a step, as one pool of memory sees it."""

    pool: Runner
    live: Mapping[str, int]
    """What was computed into this pool and is still there."""
    bytes: int


@dataclass
class Timeline:
    """A step, seen by its memory."""

    resident: int
    """Bytes that are there all the time: parameters, buffers, inputs, and what the optimizer keeps for parameters."""
    moments: list[Moment] = field(default_factory=list)
    """The highest moment of each segment, in the order of running."""

    @property
    def highest(self) -> list[Moment]:
        """The moment of each pool at which most is alive in it."""
        found: dict[Runner, Moment] = {}
        for moment in self.moments:
            if moment.pool not in found or moment.bytes > found[moment.pool].bytes:
                found[moment.pool] = moment
        return list(found.values())

    @property
    def own(self) -> int:
        """The most bytes that a step takes beside what is there all the time."""
        return sum(moment.bytes for moment in self.highest)

    @property
    def peak(self) -> int:
        """The most bytes that a step takes in all."""
        return self.resident + self.own


STATES = 2
"""Values that an optimizer keeps for each parameter. Nothing knows the optimizer yet; Adam keeps two moments."""


def timeline(forward: fx.GraphModule, backward: fx.GraphModule, wanted: int, cutter: Cutter) -> Timeline:
    """A step of these graphs, which are changed. Of what the forward gives, the first `wanted` outputs are the caller's
    and stay; the others are kept for the backward."""
    given = forward.graph.find_nodes(op="placeholder")
    step = Timeline(_resident(given, backward.graph))
    live = _Live()
    step.moments += _moments(forward, live, cutter(forward), {}, set())
    kept = {node.name: owner(node).name for node in returned(forward.graph) if isinstance(node, fx.Node)}
    there = {node.name for node in given}.union(kept)
    passed = [node for node in backward.graph.find_nodes(op="placeholder") if is_tensor(node)]
    for tangent in passed:
        if tangent.name not in there:
            live.add(tangent.name, _bytes(tangent), Runner.PYTORCH)
    lasting = {kept[node.name] for node in returned(forward.graph)[:wanted] if isinstance(node, fx.Node)}
    step.moments += _moments(backward, live, cutter(backward), kept, lasting)
    return step


def _resident(given: Iterable[fx.Node], backward: fx.Graph) -> int:
    """The inputs, and the states for those parameters that get a gradient: each leads to one output of the backward."""
    inputs = list(given)
    trained = [node for node, gradient in zip(inputs, returned(backward), strict=False) if gradient is not None]
    return sum(map(_bytes, inputs)) + STATES * sum(map(_bytes, trained))


class _Live:
    """What is alive, by pool: names of values that own memory, and their bytes."""

    def __init__(self) -> None:
        self._pools: dict[Runner, dict[str, int]] = {runner: {} for runner in Runner}
        self._bytes = dict.fromkeys(Runner, 0)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._pools.values())

    def add(self, name: str, size: int, pool: Runner) -> None:
        """A value comes into being."""
        self._pools[pool][name] = size
        self._bytes[pool] += size

    def drop(self, names: Iterable[str]) -> None:
        """Values are let go, where they are here."""
        for pool, name in product(Runner, names):
            self._bytes[pool] -= self._pools[pool].pop(name, 0)

    def moment(self, pool: Runner) -> Moment:
        """How it is now."""
        return Moment(pool, dict(self._pools[pool]), self._bytes[pool])

    def bytes(self, pool: Runner) -> int:
        """How much it is now."""
        return self._bytes[pool]


def _moments(
    module: fx.GraphModule, live: _Live, cuts: list[Cut], names: Mapping[str, str], lasting: Collection[str]
) -> Iterator[Moment]:
    """The highest moment of each segment. `live` is what is alive before and, when all was taken, afterwards; `names`
    tells for inputs which of it they are, `lasting` what stays although nobody here reads it."""

    def memory(node: fx.Node) -> str:
        own = owner(node).name
        return names.get(own, own)

    stays = {memory(node) for node in returned(module.graph) if isinstance(node, fx.Node)} | set(lasting)
    last = {memory(item): cut for cut in cuts for node in cut.nodes for item in _read(node)}
    live.drop([own for own in live if own not in last and own not in stays])
    for cut in cuts:
        reader = {memory(item): node for node in cut.nodes for item in _read(node)}
        given = set(live) if cut.runner is Runner.ORT else set()
        highest = live.moment(cut.runner)
        for node in cut.nodes:
            for made in _made(node):
                live.add(made.name, _bytes(made), cut.runner)
            if live.bytes(cut.runner) > highest.bytes:
                highest = live.moment(cut.runner)
            over = {memory(item) for item in [*_read(node), *_made(node)]} - stays - given
            live.drop([own for own in over if last.get(own, cut) is cut and reader.get(own, node) is node])
        live.drop([own for own in given if last.get(own) is cut and own not in stays])
        yield highest


def _read(node: fx.Node) -> Iterable[fx.Node]:
    return (item for item in node.all_input_nodes if not is_size(item))


def _made(node: fx.Node) -> Iterable[fx.Node]:
    """The values that a node computes into memory of their own."""
    return [] if is_view(node) or is_part(node) or writes(node) else tensors_of(node)


def _bytes(node: fx.Node) -> int:
    return sum(map(hinted_bytes, fakes_in(node.meta.get("val"))))
