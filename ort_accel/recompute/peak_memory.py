"""What is alive at each moment of a training step, and the moment at which that is most.

The forward and the backward are followed segment by segment, since a segment of ONNX Runtime holds all that it was
given until it has ended, while PyTorch lets go of each value behind its last reader. Sizes are those that the graph was
captured with.

ONNX Runtime and PyTorch have a pool of memory each, and neither uses what the other one has left. That of ONNX Runtime
keeps what it ever held, so the peak of a step is the sum of both pools' highest moments, whenever they are; unless it
gives back what it does not use, behind the forward and the backward or behind each segment. On a CUDA device both can
share one pool, PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from typing import Any

import torch
from torch import fx

from ort_accel.executor.ort_segment import lie_in_pool
from ort_accel.executor.reuse_operands import is_own, replaceable
from ort_accel.executor.torch_segment import lies_in_pool
from ort_accel.graph.nodes import bytes_made, is_part, is_size, is_view, returned, tensors_of, writes
from ort_accel.kernels.bit_mask import own as bits
from ort_accel.kernels.host_copies import is_on_host, own
from ort_accel.partition.segments import Cut
from ort_accel.partition.split_at_gradients import Gradients
from ort_accel.recompute.backward_gradients import gradients_of
from ort_accel.recompute.joint_graph import is_tensor, owner
from ort_accel.recompute.memory_pools import BORROWED, Moment, Pools
from ort_accel.recompute.workspace import scratch
from ort_accel.reporting import Runner

Cutter = Callable[[fx.GraphModule, Gradients], list[Cut]]
"""Tells into which segments a graph would be cut, so that these gradients can leave it early. It may change the graph
that it is given."""

STATES = 2
"""Values that an optimizer keeps for each parameter. Nothing knows the optimizer yet; Adam keeps two moments."""
WORKING = 2
"""Values of the size of a parameter that its update takes, one parameter after the other, as PyTorch's AdamW does."""

aten = torch.ops.aten

IN_PLACE = {aten.sigmoid, aten.tanh, aten.relu, aten._softmax}
"""Operators that ONNX Runtime computes in the memory of an input that nobody reads any more."""


@dataclass(frozen=True)
class Holding:
    """Who holds memory in a step, and for how long."""

    shrinks: bool = False
    """ONNX Runtime's pool gives back what it does not use, behind the forward and behind the backward; otherwise every
    step begins with all that it ever held."""
    shrinks_each_time: bool = False
    """It does so behind each segment, too."""
    pool_from: float = 0
    """From so many bytes on, a result lies in ONNX Runtime's pool; smaller ones that leave a segment of it lie in
    PyTorch's memory."""
    shared: bool = False
    """ONNX Runtime takes all its memory from PyTorch's pool, and gives it back there."""
    steps_early: bool = False
    """The optimizer uses gradients up as soon as the segment that makes them has run."""

    @property
    def keeps(self) -> bool:
        """Whether ONNX Runtime's pool holds all the time what it ever held."""
        return not self.shrinks and not self.shared


@dataclass(frozen=True)
class Stage:
    """The highest moment of a segment, or of the optimizer's step."""

    phase: str
    live: Mapping[str, int]
    """What is there, by the name of the value that owns the memory."""
    in_ort: int
    """How many bytes of it lie in ONNX Runtime's pool."""
    held: int
    """How many bytes that pool holds."""


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
    own: int = 0
    """The most bytes that a step takes beside what is there all the time."""
    highest: list[Moment] = field(default_factory=list)
    """The moments that make it so much: less alive at any of them may make it less."""
    stages: list[Stage] = field(default_factory=list)
    """The segments in the order of running, and the optimizer's step."""
    stands_for: dict[str, str] = field(default_factory=dict)
    """Which value is meant by what lies on the device: before it is moved to host memory, as what has come back from
    there, or as the bits of a mask."""
    keeping: float = 0.0
    """Milliseconds that it takes longer because values are kept otherwise, in host memory or as bits, as the cost model
    has it."""

    @property
    def resident(self) -> int:
        """Bytes that are there all the time."""
        return self.lasting + self.states

    @property
    def peak(self) -> int:
        """The most bytes that a step takes in all."""
        return self.resident + self.own


def timeline(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    wanted: int,
    cutter: Cutter,
    holding: Holding,
) -> Timeline:
    """A step of these graphs, which are changed. Of what the forward gives, the first `wanted` outputs are the caller's
    and stay; the others are kept for the backward."""
    given = forward.graph.find_nodes(op="placeholder")
    trained = [node for node, slope in zip(given, returned(backward.graph), strict=False) if slope is not None]
    gradients = gradients_of(forward, backward, wanted) if holding.steps_early else ()
    pools = Pools(holding.shared)
    step = Timeline(sum(map(bytes_made, given)), STATES * sum(map(bytes_made, trained)))
    step.stages += _Half(forward, {}, set(), holding).stages("forward", pools, cutter(forward, ()))
    if holding.shrinks:
        pools.shrink()
    results = returned(forward.graph)
    kept = {node.name: owner(node).name for node in results if isinstance(node, fx.Node)}
    lasting = {kept[node.name] for node in results[:wanted] if isinstance(node, fx.Node)}
    step.stash = frozenset(kept[node.name] for node in results[wanted:] if isinstance(node, fx.Node)) - lasting
    step.stands_for = _moved(results, backward.graph) | _bits(results)
    there = {node.name for node in given}.union(kept)
    for tangent in backward.graph.find_nodes(op="placeholder"):
        if is_tensor(tangent) and tangent.name not in there:
            pools.add(tangent.name, bytes_made(tangent), Runner.PYTORCH)
    second = _Half(backward, kept, lasting, holding, gradients)
    step.stages += second.stages("backward", pools, cutter(backward, gradients))
    step.gradients = frozenset(second.memory(node) for node in returned(backward.graph) if isinstance(node, fx.Node))
    if holding.shrinks:
        pools.shrink()
    pools.add(BORROWED, WORKING * max(map(bytes_made, trained), default=0), Runner.PYTORCH)
    step.stages.append(_stage("optimizer", pools))
    step.highest = [pools.together] if holding.shared else [*pools.highest.values(), pools.together]
    step.own = pools.together.bytes
    if holding.keeps:
        step.own = sum(moment.bytes for moment in pools.highest.values())
        step.stages = [replace(stage, held=pools.highest[Runner.ORT].bytes) for stage in step.stages]
    return step


def _moved(results: Iterable[Any], backward: fx.Graph) -> dict[str, str]:
    """Which value lies on the device, by the name that it has before it is moved, and when it has come back."""
    on_host = [node for node in results if isinstance(node, fx.Node) and is_on_host(node)]
    sent = {node.name: owner(node.all_input_nodes[0]).name for node in on_host}
    back = backward.find_nodes(op="call_function", target=own.from_host.default)
    return {name: name for name in sent.values()} | {node.name: sent[node.all_input_nodes[0].name] for node in back}


def _bits(results: Iterable[Any]) -> dict[str, str]:
    """Of which mask these are the bits."""
    kept = [node for node in results if isinstance(node, fx.Node) and node.target is bits.to_bits.default]
    return {node.name: owner(node.all_input_nodes[0]).name for node in kept}


class _Half:
    """The forward or the backward of a step."""

    def __init__(
        self,
        module: fx.GraphModule,
        names: Mapping[str, str],
        lasting: Collection[str],
        holding: Holding,
        gradients: Gradients = (),
    ) -> None:
        """`names` tells for inputs which value they are, `lasting` what stays although nobody here reads it,
        `gradients` which outputs leave as soon as the segment that makes them has run."""
        self._names, self._holding = names, holding
        results = returned(module.graph)
        early = [node for node, source in zip(results, gradients, strict=False) if source is not None]
        self._leaving = {self.memory(node) for node in early if isinstance(node, fx.Node)}
        self._stays = {self.memory(node) for node in results if isinstance(node, fx.Node)} - self._leaving
        self._stays |= set(lasting)
        self._last: dict[str, Cut] = {}
        self._own: set[str] = set()

    def memory(self, node: fx.Node) -> str:
        """The name of the value that owns a node's memory."""
        name = owner(node).name
        return self._names.get(name, name)

    def stages(self, phase: str, pools: Pools, cuts: list[Cut]) -> Iterator[Stage]:
        """The highest moment of each segment. The pools have what is alive before and, when all was taken, after it."""
        made = {item.name: cut for cut in cuts for node in cut.nodes for item in _made(node)}
        self._own = {node.name for cut in cuts for node in cut.nodes if is_own(node, cut.runner)}
        self._last = {name: made[name] for name in self._leaving if name in made}
        self._last |= {self.memory(item): cut for cut in cuts for node in cut.nodes for item in _read(node)}
        pools.drop([name for name in pools if self._is_over(name)])
        uses, position = self._uses(cuts), count()
        for cut in cuts:
            reader = {self.memory(item): node for node in cut.nodes for item in _read(node)}
            given = set(pools) if cut.runner is Runner.ORT else set()
            in_pytorch = self._in_pytorch(cut)
            highest = _stage(phase, pools)
            most = self._counted(pools)
            for node in cut.nodes:
                pools.is_used = partial(_is_used, uses, next(position))
                read = dict.fromkeys(map(self.memory, _read(node)))
                over = [name for name in read if self._is_over(name, cut) and name not in given]
                over = [name for name in over if reader[name] is node]
                borrowed = self._compute(node, cut, over, in_pytorch, pools)
                if self._counted(pools) > most:
                    highest, most = _stage(phase, pools), self._counted(pools)
                unread = [item.name for item in _made(node) if self._is_over(item.name)]
                pools.drop([*borrowed, *over, *unread])
            pools.drop([name for name in given | self._leaving if self._is_over(name, cut)])
            if self._holding.shrinks_each_time:
                pools.shrink()
            yield highest
        pools.is_used = Moment.is_used

    def _uses(self, cuts: Iterable[Cut]) -> dict[str, tuple[int, int]]:
        """The positions of the first and the last operator that makes or reads each value."""
        found: dict[str, tuple[int, int]] = {}
        for position, node in enumerate(node for cut in cuts for node in cut.nodes):
            values = [] if is_view(node) or is_part(node) else [*_made(node), *_read(node)]
            found |= {name: (found.get(name, (position,))[0], position) for name in map(self.memory, values)}
        return found

    def _counted(self, pools: Pools) -> int:
        """What makes one moment higher than another one."""
        return pools.in_pytorch if self._holding.keeps else pools.bytes

    def _is_over(self, name: str, cut: Cut | None = None) -> bool:
        """Whether a value is read for the last time in a segment; without one, whether it is read nowhere."""
        return name not in self._stays and self._last.get(name) is cut

    def _is_inner(self, name: str, cut: Cut) -> bool:
        """Whether a value begins and ends within a segment."""
        return self._is_over(name, cut) and name not in self._leaving

    def _compute(
        self, node: fx.Node, cut: Cut, over: Collection[str], in_pytorch: Collection[str], pools: Pools
    ) -> list[str]:
        """Take what an operator needs, and tell what of it is there for itself. `over` is what it is the last to read,
        `in_pytorch` lies in PyTorch's memory."""
        taken = scratch(node, cut.runner)
        passing = {f"{BORROWED} {number}": size for number, size in enumerate(taken.passing)}
        beside = {f"{BORROWED} {number}": size for number, size in enumerate(taken.beside, len(passing))}
        for name, size in (passing | beside).items():
            pools.add(name, size, cut.runner)
        pools.drop(passing)
        if (donor := self._donor(node, cut, over, pools)) is not None:
            pools.replace(donor, node.name)
            return list(beside)
        for item in _made(node):
            pools.add(item.name, bytes_made(item), Runner.PYTORCH if item.name in in_pytorch else Runner.ORT)
        return list(beside)

    def _donor(self, node: fx.Node, cut: Cut, over: Collection[str], pools: Pools) -> str | None:
        """The value in whose memory an operator computes, if it does: it is the last to read it."""
        if cut.runner is Runner.PYTORCH:
            names = (self.memory(operand) for operand in replaceable(node))
            return next((name for name in names if name in over and name in self._own), None)
        if _packet(node) not in IN_PLACE or not self._is_inner(node.name, cut):
            return None
        return next((name for name in over if pools.size_in_ort(name) == bytes_made(node)), None)

    def _in_pytorch(self, cut: Cut) -> set[str]:
        """What a segment makes in PyTorch's memory."""
        made = [item for node in cut.nodes for item in _made(node)]
        if cut.runner is Runner.PYTORCH:
            return {item.name for item in made if self._holding.pool_from == inf or not lies_in_pool(item)}
        left = [item for item in made if not self._is_inner(item.name, cut) and not self._is_over(item.name)]
        return set() if lie_in_pool(left, self._holding.pool_from) else {item.name for item in left}


def _is_used(uses: Mapping[str, tuple[int, int]], position: int, name: str) -> bool:
    """Whether an operator at a position, or some before it and some behind it, work with a value."""
    first, last = uses.get(name, (0, -1))
    return first <= position <= last


def _stage(phase: str, pools: Pools) -> Stage:
    return Stage(phase, pools.live, pools.in_ort, pools.held)


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


def _read(node: fx.Node) -> Iterable[fx.Node]:
    return (item for item in node.all_input_nodes if not is_size(item))


def _made(node: fx.Node) -> list[fx.Node]:
    """The values that a node computes into memory of their own, on the device."""
    is_none = is_view(node) or is_part(node) or writes(node) or is_on_host(node)
    return [] if is_none else tensors_of(node)
