"""The memory planner of one model: decides for each joint graph what is recomputed or offloaded, and reports it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from ort_accel.config.plan_text import join_plans, read_plan_file
from ort_accel.config.sections import Memory
from ort_accel.graph.nodes import fakes_in
from ort_accel.operators.facts import facts
from ort_accel.recompute.budget import Candidate, FrontierPoint, MemoryPlan, Predict, fit_budget, frontier, limit_bytes
from ort_accel.recompute.checkpoint_marks import Marks, take_marks
from ort_accel.recompute.cost import node_ms
from ort_accel.recompute.joint_graph import forward_nodes, is_unchanged_input, packet, producer
from ort_accel.recompute.memory_report import memory_stages, offload_rows, plan_rows, symbol_values
from ort_accel.recompute.offload import OffloadCandidates, insert_offload
from ort_accel.recompute.pack_masks import has_masks, packed_bytes, packing_ms
from ort_accel.recompute.peak_memory import Cutter, OptimizerStates, StepMemory, predict_step
from ort_accel.recompute.plans import PlanOption, Probe, RecomputeSite, find_plans, match_plans
from ort_accel.recompute.saved_values import saved_values, total_bytes
from ort_accel.recompute.split_joint_graph import GraphPair, copy_joint_graph, split_joint_graph
from ort_accel.recompute.transformer_layers import Layers, find_layers, layer_indices
from ort_accel.reporting.memory import GraphMemory, Peak, PlanKind
from ort_accel.reporting.report import Report

aten = torch.ops.aten

OFFLOAD_FEATURE = "memory.offload"

LOG = logging.getLogger("ort_accel")

NO_LAYERS = (
    "no transformer layer was found (a norm around an attention with a residual connection), so memory.level {level} "
    "recomputes nothing"
)

CHEAP_EFFECT = "auto: norms, activations and arithmetic are recomputed, which costs little"

LEAST_BYTES_PER_MS = 4e6
"""Cheap operators are recomputed by default if that frees this many bytes for a millisecond of the cost model."""


@dataclass(frozen=True)
class _Graph:
    """A joint graph with its layers, its plan options and the marks of activation checkpointing."""

    joint: fx.Graph
    name: str
    layers: Layers
    options: list[PlanOption]
    marks: Marks

    @property
    def inner_nodes(self) -> set[fx.Node]:
        """Operators between the first layer border and the last norm. The backward reads later values at once."""
        indices = layer_indices(forward_nodes(self.joint), self.layers)
        last = len(self.layers.starts) + (1 if self.layers.end is None else 0)
        return {node for node, index in indices.items() if 0 < index <= last}


class MemoryPlanner:
    """Plans recompute and offload for the graphs of one model."""

    def __init__(
        self,
        memory: Memory,
        report: Report,
        cutter: Cutter,
        states: OptimizerStates,
        steps_early: bool = False,
        predicts: bool = False,
    ) -> None:
        """`steps_early`: the optimizer consumes gradients in the backward. `predicts` asks for the peak of a step in
        the report, which takes a while; a budget needs it anyway."""
        self._memory, self._report, self._cutter, self._steps_early = memory, report, cutter, steps_early
        self._states = states
        self._predicts = predicts or memory.budget is not None
        self._level = 0 if memory.level == "auto" else memory.level
        self._plans = read_plan_file(memory.plan_file) if memory.plan_file is not None else join_plans(memory.plans)

    def partition(
        self, joint: fx.GraphModule, inputs: Sequence[object], graph: str, *, num_fwd_outputs: int, **options: object
    ) -> GraphPair:
        """Split a joint graph into forward and backward by a plan, which is recorded in the report."""

        def split(module: fx.GraphModule, recomputed: Collection[fx.Node], packs_masks: bool) -> GraphPair:
            return split_joint_graph(
                module, inputs, recomputed, packs_masks, num_fwd_outputs=num_fwd_outputs, **options
            )

        @cache
        def predict(plan: MemoryPlan) -> StepMemory:
            copy, copied = copy_joint_graph(joint, plan.recomputed)
            pair = split(copy, copied, plan.packs_masks)
            overhead_ms = insert_offload(pair, num_fwd_outputs, plan.moved).cost_ms + packing_ms(pair)
            step = predict_step(*pair, num_fwd_outputs, self._cutter, self._states, self._steps_early)
            step.overhead_ms = overhead_ms
            return step

        candidates = OffloadCandidates(joint.graph, num_fwd_outputs) if self._memory.offload else None
        plan = self._choose(joint.graph, graph, predict, candidates)
        pair = split(joint, plan.recomputed, plan.packs_masks)
        record = self._report.memory[graph]
        record.stash = total_bytes(saved_values(joint.graph))
        record.bits, record.masks = packed_bytes(joint.graph)
        if candidates is not None:
            self._offload(pair, num_fwd_outputs, plan.moved, candidates, record)
        return pair

    def _choose(self, joint: fx.Graph, name: str, predict: Predict, candidates: OffloadCandidates | None) -> MemoryPlan:
        """Choose a plan and record it in the report."""
        marks = take_marks(joint)
        layers = find_layers(forward_nodes(joint))
        graph = _Graph(joint, name, layers, find_plans(joint, layers, self._probe()), marks)
        requests = match_plans(self._plans, graph.options)
        sites = [site for site in self._level_sites(graph) if not site.nodes & marks.region_inputs]
        if self._memory.decides_itself and sites:
            self._report.applied("memory.level", CHEAP_EFFECT)
        sites += [site for request in requests for site in request.sites]
        always = marks.recomputed.union(*(site.nodes for site in sites))
        packs_masks = has_masks(joint) and (self._level > 0 or self._memory.decides_itself)
        plan = MemoryPlan(frozenset(always), packs_masks=packs_masks)
        tried: list[FrontierPoint] = []
        if self._memory.budget is not None:
            tried = fit_budget(self._memory.budget, self._frontiers(graph, sites, always, predict, candidates))
            sites, plan = [*sites, *tried[-1].sites], tried[-1].chosen
        elif self._predicts:
            compared = [MemoryPlan(), plan] if plan.recomputed or plan.packs_masks else [plan]
            tried = [FrontierPoint(each, predict(each)) for each in compared]
        record = self._record(graph, plan, tried)
        record.plans = plan_rows(graph.options, requests, sites)
        return plan

    def _frontiers(
        self,
        graph: _Graph,
        sites: Collection[RecomputeSite],
        always: Collection[fx.Node],
        predict: Predict,
        offload: OffloadCandidates | None,
    ) -> list[Iterator[FrontierPoint]]:
        """Returns the frontier of recompute, and the one of recompute and offload if values can be offloaded."""
        every = (site for option in graph.options if option.kind == PlanKind.RECOMPUTE for site in option.sites)
        free = [site for site in every if site not in sites and not site.nodes & graph.marks.region_inputs]
        moves = [site for site in offload.sites() if producer(site.value.node) not in always] if offload else []
        both: list[Sequence[Candidate]] = [free, [*free, *moves]] if moves else [free]
        inner, masks = graph.inner_nodes, has_masks(graph.joint)
        return [frontier(_inner_first(some, inner), always, predict, masks) for some in both]

    def _offload(
        self,
        pair: GraphPair,
        num_outputs: int,
        names: Collection[str],
        candidates: OffloadCandidates,
        record: GraphMemory,
    ) -> None:
        """Offload these values as far as the split graphs save them, and record it."""
        offloaded = insert_offload(pair, num_outputs, names)
        record.stash -= offloaded.bytes
        record.moved, record.moving_ms = offloaded.bytes, offloaded.cost_ms
        record.plans += offload_rows(candidates, offloaded)
        moved = sum(graph.moved for graph in self._report.memory.values())
        if moved:
            self._report.applied(OFFLOAD_FEATURE, f"{moved / 2**20:,.1f} MiB go to host memory and back in every step")
        else:
            self._report.off(OFFLOAD_FEATURE, "nothing is moved: recompute alone keeps the budget at less cost")

    def _probe(self) -> Probe:
        decides = self._level or self._memory.budget is not None
        return Probe.parse("1:1" if decides else self._memory.probe)

    def _level_sites(self, graph: _Graph) -> list[RecomputeSite]:
        """Returns the sites that a level recomputes.

        1. Level 1 recomputes all sites within layers that are no compromise.
        2. Level 2 recomputes the compromises, too.
        3. `auto` recomputes cheap sites if no budget and no plan is given.
        """
        if self._memory.decides_itself:
            return _cheap_sites(graph.options)
        if not self._level:
            return []
        if not graph.layers.starts:
            text = f"{graph.name}: {NO_LAYERS.format(level=self._memory.level)}"
            LOG.warning(text)
            self._report.note(text)
            return []
        inner = graph.inner_nodes
        return [
            site
            for option in graph.options
            if option.kind != PlanKind.COMPROMISE or self._level == 2
            for site in option.sites
            if _is_inner(site, inner)
        ]

    def _record(self, graph: _Graph, plan: MemoryPlan, tried: Sequence[FrontierPoint]) -> GraphMemory:
        layers = len(graph.layers.starts)
        record = GraphMemory(graph.name, str(self._memory.level), layers=layers)
        if tried:
            record.frontier = [Peak(point.step.peak_bytes, point.step.resident_bytes, point.cost_ms) for point in tried]
            indices = layer_indices(forward_nodes(graph.joint), graph.layers)
            record.stages = memory_stages(tried[-1].step, indices, layers)
            record.budget = 0 if self._memory.budget is None else limit_bytes(self._memory.budget, tried[0])
        record.stash_without = total_bytes(saved_values(graph.joint))
        record.symbols = symbol_values(graph.joint)
        record.repeated, record.cost_ms = len(plan.recomputed), sum(map(node_ms, plan.recomputed))
        self._report.memory[graph.name] = record
        return record


def _is_inner(candidate: Candidate, inner: Collection[fx.Node]) -> bool:
    """True if inner operators compute all that a candidate frees."""
    return all(producer(value.node) in inner for value in candidate.saved)


def _inner_first(candidates: Sequence[Candidate], inner: Collection[fx.Node]) -> list[list[Candidate]]:
    """Returns the inner candidates, and the others."""
    return [[item for item in candidates if _is_inner(item, inner) is wanted] for wanted in (True, False)]


def _cheap_sites(options: Iterable[PlanOption]) -> list[RecomputeSite]:
    """Returns the sites of cheap operators that free enough; none on other devices, which multiply faster."""
    sites = (site for option in options if option.kind == PlanKind.RECOMPUTE for site in option.sites)
    enough = (site for site in sites if site.saved_bytes >= LEAST_BYTES_PER_MS * site.cost_ms)
    return [site for site in enough if all(map(_is_cheap, site.nodes))]


def _is_cheap(node: fx.Node) -> bool:
    is_on_cpu = all(fake.device.type == "cpu" for fake in fakes_in(node.meta["val"]))
    casts_weight = packet(node) is aten._to_copy and is_unchanged_input(node.all_input_nodes[0])
    return facts(node).is_cheap and is_on_cpu and not casts_weight
