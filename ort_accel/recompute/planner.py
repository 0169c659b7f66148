"""The memory optimizer of one model: decides for each joint graph what is computed again, and records why."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

import sympy
from torch import fx

from ort_accel.config.plan_text import Plan, join_plans, read_plan_file
from ort_accel.config.sections import Memory
from ort_accel.memory_records import GraphMemory, Peak, PlanKind, PlanRow
from ort_accel.recompute.account import account
from ort_accel.recompute.budget import Budgeted, Choice, Chosen, Foresee, choices, within
from ort_accel.recompute.cheap_ops import light_places
from ort_accel.recompute.checkpoint_marks import take_marks
from ort_accel.recompute.cost import milliseconds
from ort_accel.recompute.joint_graph import forward_nodes, whole
from ort_accel.recompute.offload import Movable, Moved, move
from ort_accel.recompute.onnx_names import cluster_of
from ort_accel.recompute.pack_masks import has_masks, packed, packing_ms
from ort_accel.recompute.peak_memory import Cutter, Holding, Timeline, timeline
from ort_accel.recompute.plans import Option, Place, Probe, Wish, find_plans, matched
from ort_accel.recompute.saved_values import Kept, stash, total
from ort_accel.recompute.split_joint_graph import Pair, partition, rehearsed
from ort_accel.recompute.transformer_layers import Layers, find_layers, region
from ort_accel.reporting import Report

FEATURE = "memory.offload"

LOG = logging.getLogger("ort_accel")

NO_LAYERS = (
    "no transformer layer was found (a norm around an attention whose input or output is added again), so memory.level "
    "{level} has no borders to compute from and keeps everything"
)

LIGHTLY = "auto: norms, activations and arithmetic are computed again, which costs next to nothing"


class Recompute:
    """`memory:` at work for one model."""

    def __init__(
        self,
        memory: Memory,
        report: Report,
        cutter: Cutter,
        holding: Holding,
        predicts: bool = False,
    ) -> None:
        """`cutter` tells how graphs will be cut into segments, `holding` who will hold memory. `predicts` asks for the
        peak of a step in the report, which takes a while; with a budget it is there anyway."""
        self._memory, self._report, self._cutter, self._holding = memory, report, cutter, holding
        self._predicts = predicts or memory.budget is not None
        self._plans = _plans(memory)

    def partition(self, joint: fx.GraphModule, inputs: Any, graph: str, **how: Any) -> Pair:
        """Divide a joint graph, with what was chosen computed again in the backward, or moved to host memory."""
        wanted = how["num_fwd_outputs"]

        @cache
        def foresee(chosen: Chosen) -> Timeline:
            pair = rehearsed(joint, inputs, chosen.nodes, chosen.as_bits, **how)
            moved = move(pair, wanted, chosen.moved)
            packing = packing_ms(pair)
            step = timeline(*pair, wanted, self._cutter, self._holding)
            step.keeping = moved.cost + packing
            return step

        movable = Movable(joint.graph, wanted) if self._memory.offload else None
        chosen = self.choose(joint.graph, graph, foresee, movable)
        divided = partition(joint, inputs, chosen.nodes, chosen.as_bits, **how)
        record = self._report.memory[graph]
        record.stash = total(stash(joint.graph))
        record.bits, record.masks = packed(joint.graph)
        if movable is not None:
            self._move(divided, wanted, chosen.moved, movable, record)
        return divided

    def choose(self, joint: fx.Graph, graph: str, foresee: Foresee, movable: Movable | None) -> Chosen:
        """What becomes of what is kept, recorded in the report."""
        marks = take_marks(joint)
        layers = find_layers(forward_nodes(joint))
        record = GraphMemory(graph, str(self._memory.level), layers=len(layers.starts))
        options = find_plans(joint, layers, self._probe())
        wishes = matched(self._plans, options)
        taken = [place for place in self._by_level(joint, layers, options, graph) if not place.nodes & marks.borders]
        if self._memory.decides_itself and taken:
            self._report.applied("memory.level", LIGHTLY)
        taken += [place for wish in wishes for place in wish.places]
        always = marks.again.union(*(place.nodes for place in taken))
        masks = has_masks(joint)
        chosen = Chosen(frozenset(always), as_bits=masks and (self._level() > 0 or self._memory.decides_itself))
        tried: list[Choice] = []
        if self._memory.budget is not None:
            places = (place for option in options if option.kind == PlanKind.RECOMPUTE for place in option.places)
            free = [place for place in places if place not in taken and not place.nodes & marks.borders]
            moves = [item for item in movable.moves() if whole(item.kept.node) not in always] if movable else []
            both: list[Sequence[Budgeted]] = [free, [*free, *moves]] if moves else [free]
            inside = within_layers(joint, layers)
            sequences = [choices(_inside_first(some, inside), always, foresee, masks) for some in both]
            tried = within(self._memory.budget, sequences)
            taken, chosen = [*taken, *tried[-1].places], tried[-1].chosen
        elif self._predicts:
            both_ways = [Chosen(), chosen] if chosen.nodes or chosen.as_bits else [chosen]
            tried = [Choice(one, foresee(one)) for one in both_ways]
        if tried:
            record.frontier = [Peak(choice.step.peak, choice.step.resident, choice.cost) for choice in tried]
            record.stages = account(tried[-1].step, region(forward_nodes(joint), layers), len(layers.starts))
        record.plans = _rows(options, wishes, taken)
        self._record(record, joint, chosen.nodes)
        return chosen

    def _move(self, pair: Pair, wanted: int, values: Collection[str], movable: Movable, record: GraphMemory) -> None:
        """Move these values, where the divided graphs still keep them, and record it."""
        moved = move(pair, wanted, values)
        record.stash -= moved.bytes
        record.moved, record.moving_ms = moved.bytes, moved.cost
        record.plans += _move_rows(movable, moved)
        offloaded = sum(graph.moved for graph in self._report.memory.values())
        if offloaded:
            self._report.applied(FEATURE, f"{offloaded / 2**20:,.1f} MiB go to host memory and back in every step")
        else:
            self._report.off(FEATURE, "nothing is moved: the budget is kept at less cost without")

    def _level(self) -> int:
        return 0 if self._memory.level == "auto" else self._memory.level

    def _probe(self) -> Probe:
        decides = self._level() or self._memory.budget is not None
        return Probe.parse("1:1" if decides else self._memory.probe)

    def _by_level(self, joint: fx.Graph, layers: Layers, options: Sequence[Option], graph: str) -> list[Place]:
        """What a level computes again: all that lies within layers, and at level 1 without compromises. Where nothing
        is asked for, what costs next to nothing."""
        if self._memory.decides_itself:
            return light_places(options)
        if not self._level():
            return []
        if not layers.starts:
            text = f"{graph}: {NO_LAYERS.format(level=self._memory.level)}"
            LOG.warning(text)
            self._report.note(text)
            return []
        inside = within_layers(joint, layers)
        return [
            place
            for option in options
            if option.kind != PlanKind.COMPROMISE or self._level() == 2
            for place in option.places
            if _lies_in(place, inside)
        ]

    def _record(self, record: GraphMemory, joint: fx.Graph, chosen: Collection[fx.Node]) -> None:
        kept = stash(joint)
        record.stash_without = total(kept)
        record.symbols = _symbols(joint)
        record.repeated, record.cost_ms = len(chosen), sum(map(milliseconds, chosen))
        self._report.memory[record.graph] = record


def within_layers(joint: fx.Graph, layers: Layers) -> set[fx.Node]:
    """Operators behind the first boundary and before the last norm: what follows is needed at once in the backward."""
    places = region(forward_nodes(joint), layers)
    last = len(layers.starts) + (1 if layers.end is None else 0)
    return {node for node, place in places.items() if 0 < place <= last}


def _lies_in(option: Budgeted, nodes: Collection[fx.Node]) -> bool:
    """Whether all that an option does not keep is computed by one of these operators."""
    return all(whole(item.node) in nodes for item in option.saved)


def _inside_first(options: Sequence[Budgeted], inside: Collection[fx.Node]) -> list[list[Budgeted]]:
    """The options that lie inside, and the others."""
    return [[option for option in options if _lies_in(option, inside) is wanted] for wanted in (True, False)]


def _plans(memory: Memory) -> tuple[Plan, ...]:
    return read_plan_file(memory.plan_file) if memory.plan_file is not None else join_plans(memory.plans)


def _rows(options: Sequence[Option], wishes: Sequence[Wish], taken: Iterable[Place]) -> list[PlanRow]:
    requested = {(wish.option.cluster, wish.option.kind): wish.requested for wish in wishes}
    applied = set(map(id, taken))
    return [
        PlanRow(
            option.cluster,
            option.kind,
            requested.get((option.cluster, option.kind), 0),
            sum(id(place) in applied for place in option.places),
            len(option.places),
            sum(place.hint for place in option.places),
            str(sympy.expand(sum(place.bytes for place in option.places))),
            sum(place.cost for place in option.places),
            tuple(kept.shape for kept in option.places[0].saved),
        )
        for option in options
    ]


def _move_rows(movable: Movable, moved: Moved) -> list[PlanRow]:
    """One for each kind of operator whose results can be moved."""
    kinds: dict[str, list[Kept]] = {}
    for kept in movable.values.values():
        kinds.setdefault(cluster_of([whole(kept.node)]) or "Identity+", []).append(kept)
    return [
        PlanRow(
            cluster,
            PlanKind.OFFLOAD,
            0,
            sum(kept.node.name in moved.values for kept in values),
            len(values),
            sum(kept.hint for kept in values),
            str(sympy.expand(sum(kept.bytes for kept in values))),
            movable.cost([kept.node.name for kept in values]),
            (values[0].shape,),
        )
        for cluster, values in kinds.items()
    ]


def _symbols(joint: fx.Graph) -> dict[str, int]:
    """The sizes of the inputs that can change, with their values at capture."""
    found: dict[str, int] = {}
    for node in joint.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in getattr(value, "shape", [value]):
            expr = getattr(getattr(size, "node", None), "expr", None)
            if isinstance(expr, sympy.Symbol) and size.node.has_hint():
                found[str(expr)] = int(size.node.hint)
    return found
