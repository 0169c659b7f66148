"""What is alive at each moment of a training step, and the moment at which that is most.

The forward and the backward are followed segment by segment, since a segment of ONNX Runtime holds all that it was
given until it has ended, while PyTorch lets go of each value behind its last reader. Sizes are those that the graph was
captured with.

ONNX Runtime and PyTorch have a pool of memory each, and neither uses what the other one has left. That of ONNX Runtime
keeps what it ever held, so the peak of a step is the sum of both pools' highest moments, whenever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import fx

from ort_accel.lowering.nodes import fakes_in, is_part, is_size, is_view, returned, tensors_of, writes
from ort_accel.lowering.segments import Cut
from ort_accel.recompute.arena import Arena
from ort_accel.recompute.graph import hinted_bytes, is_tensor, owner
from ort_accel.recompute.scratch import scratch
from ort_accel.reporting import Runner

Cutter = Callable[[fx.GraphModule], list[Cut]]
"""Tells into which segments a graph would be cut. It may change the graph that it is given."""

STATES = 2
"""Values that an optimizer keeps for each parameter. Nothing knows the optimizer yet; Adam keeps two moments."""
WORKING = 2
"""Values of the size of a parameter that its update takes, one parameter after the other, as PyTorch's AdamW does."""

aten = torch.ops.aten

IN_PLACE = {aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.exp, aten.sqrt, aten.sigmoid, aten.tanh, aten.relu}
"""Operators that ONNX Runtime computes in the memory of an input that nobody reads any more."""


@dataclass(frozen=True)
class Moment:
    """One moment of a step, as one pool of memory sees it."""

    live: Mapping[str, int]
    """What was computed into this pool and is still there."""
    bytes: int
    """What the pool holds."""


@dataclass(frozen=True)
class Stage:
    """The highest moment of a segment, or of the optimizer's step."""

    phase: str
    live: Mapping[str, int]
    """What is there, by the name of the value that owns the memory."""
    ort: int
    """How much of it lies in ONNX Runtime's pool."""


@dataclass
class Timeline:
    """A step, seen by its memory."""

    lasting: int
    """Bytes that are there all the time: parameters, buffers and inputs."""
    states: int
    """Bytes that the optimizer keeps for parameters."""
    stash: frozenset[str] = frozenset()
    """Names of the values that are kept for the backward."""
    gradients: frozenset[str] = frozenset()
    highest: Mapping[Runner, Moment] = field(default_factory=dict)
    """The moment of each pool at which it holds most."""
    stages: list[Stage] = field(default_factory=list)
    """The segments in the order of running, and the optimizer's step."""

    @property
    def resident(self) -> int:
        """Bytes that are there all the time."""
        return self.lasting + self.states

    @property
    def own(self) -> int:
        """The most bytes that a step takes beside what is there all the time."""
        return sum(moment.bytes for moment in self.highest.values())

    @property
    def peak(self) -> int:
        """The most bytes that a step takes in all."""
        return self.resident + self.own


def timeline(forward: fx.GraphModule, backward: fx.GraphModule, wanted: int, cutter: Cutter) -> Timeline:
    """A step of these graphs, which are changed. Of what the forward gives, the first `wanted` outputs are the caller's
    and stay; the others are kept for the backward."""
    given = forward.graph.find_nodes(op="placeholder")
    trained = [node for node, slope in zip(given, returned(backward.graph), strict=False) if slope is not None]
    step = Timeline(sum(map(_bytes, given)), STATES * sum(map(_bytes, trained)))
    memory = _Memory()
    step.stages += _stages("forward", forward, memory, cutter(forward), {}, set())
    results = returned(forward.graph)
    kept = {node.name: owner(node).name for node in results if isinstance(node, fx.Node)}
    there = {node.name for node in given}.union(kept)
    for tangent in backward.graph.find_nodes(op="placeholder"):
        if is_tensor(tangent) and tangent.name not in there:
            memory.add(tangent.name, _bytes(tangent), Runner.PYTORCH)
    lasting = {kept[node.name] for node in results[:wanted] if isinstance(node, fx.Node)}
    step.stash = frozenset(kept[node.name] for node in results[wanted:] if isinstance(node, fx.Node)) - lasting
    step.stages += _stages("backward", backward, memory, cutter(backward), kept, lasting)
    slopes = (owner(node).name for node in returned(backward.graph) if isinstance(node, fx.Node))
    step.gradients = frozenset(kept.get(name, name) for name in slopes)
    step.stages.append(_optimizer_step(memory, WORKING * max(map(_bytes, trained), default=0)))
    step.highest = memory.highest
    return step


def _optimizer_step(memory: _Memory, working: int) -> Stage:
    with_working = memory.stage("optimizer", working)
    memory.borrow(working)
    return with_working


class _Memory:
    """What is alive, by pool: names of values that own memory, and their bytes."""

    def __init__(self) -> None:
        self.highest = {runner: Moment({}, 0) for runner in Runner}
        self._live: dict[Runner, dict[str, int]] = {runner: {} for runner in Runner}
        self._bytes = dict.fromkeys(Runner, 0)
        self._arena = Arena()

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._live.values())

    @property
    def bytes(self) -> int:
        """How much is alive."""
        return sum(self._bytes.values())

    def add(self, name: str, size: int, pool: Runner) -> None:
        """A value comes into being."""
        self._live[pool][name] = size
        self._bytes[pool] += size
        if pool is Runner.ORT:
            self._arena.take(name, size)
        self._note(pool, self._arena.held if pool is Runner.ORT else self._bytes[pool])

    def replace(self, name: str, by: str) -> None:
        """A value of ONNX Runtime comes into being where another one was."""
        pool = self._live[Runner.ORT]
        pool[by] = pool.pop(name)
        self._arena.hand_on(name, by)

    def drop(self, names: Iterable[str]) -> None:
        """Values are let go, where they are here."""
        for name in names:
            if name in self._live[Runner.ORT]:
                self._arena.give(name)
            for pool in Runner:
                self._bytes[pool] -= self._live[pool].pop(name, 0)

    def borrow(self, size: int) -> None:
        """PyTorch takes memory for a while."""
        self._note(Runner.PYTORCH, self._bytes[Runner.PYTORCH] + size)

    def size_in_ort(self, name: str) -> int | None:
        """The bytes of a value that ONNX Runtime holds."""
        return self._live[Runner.ORT].get(name)

    def stage(self, phase: str, borrowed: int = 0) -> Stage:
        """How it is now."""
        live = {**self._live[Runner.ORT], **self._live[Runner.PYTORCH]} | ({"": borrowed} if borrowed else {})
        return Stage(phase, live, self._bytes[Runner.ORT])

    def _note(self, pool: Runner, size: int) -> None:
        if size > self.highest[pool].bytes:
            self.highest[pool] = Moment(dict(self._live[pool]), size)


def _stages(
    phase: str,
    module: fx.GraphModule,
    memory: _Memory,
    cuts: list[Cut],
    names: Mapping[str, str],
    lasting: Collection[str],
) -> Iterator[Stage]:
    """The highest moment of each segment. `memory` is what is alive before and, when all was taken, afterwards; `names`
    tells for inputs which of it they are, `lasting` what stays although nobody here reads it."""

    def own(node: fx.Node) -> str:
        name = owner(node).name
        return names.get(name, name)

    stays = {own(node) for node in returned(module.graph) if isinstance(node, fx.Node)} | set(lasting)
    last = {own(item): cut for cut in cuts for node in cut.nodes for item in _read(node)}
    memory.drop([name for name in memory if name not in last and name not in stays])
    for cut in cuts:
        reader = {own(item): node for node in cut.nodes for item in _read(node)}
        inside = {name for name in last if last[name] is cut} - stays
        given = set(memory) if cut.runner is Runner.ORT else set()
        highest, most = memory.stage(phase), memory.bytes
        for node in cut.nodes:
            read, made = list(dict.fromkeys(map(own, _read(node)))), _made(node)
            over = [name for name in read if name in inside and name not in given and reader[name] is node]
            donor = _donor(node, over, memory) if made and own(made[0]) in inside else None
            if donor is not None:
                memory.replace(donor, own(made[0]))
            else:
                for item in made:
                    memory.add(item.name, _bytes(item), cut.runner)
            borrowed = scratch(node) if cut.runner is Runner.PYTORCH else 0
            memory.borrow(borrowed)
            if memory.bytes + borrowed > most:
                highest, most = memory.stage(phase, borrowed), memory.bytes + borrowed
            memory.drop([*over, *(item.name for item in made if item.name not in last and item.name not in stays)])
        memory.drop([name for name in given if name in inside])
        yield highest


def _donor(node: fx.Node, over: Iterable[str], memory: _Memory) -> str | None:
    """The value in whose memory ONNX Runtime computes an operator: one that nobody reads any more."""
    if getattr(node.target, "overloadpacket", None) not in IN_PLACE:
        return None
    size = _bytes(node)
    return next((name for name in over if memory.size_in_ort(name) == size), None)


def _read(node: fx.Node) -> Iterable[fx.Node]:
    return (item for item in node.all_input_nodes if not is_size(item))


def _made(node: fx.Node) -> list[fx.Node]:
    """The values that a node computes into memory of their own."""
    return [] if is_view(node) or is_part(node) or writes(node) else tensors_of(node)


def _bytes(node: fx.Node) -> int:
    return sum(map(hinted_bytes, fakes_in(node.meta.get("val"))))
