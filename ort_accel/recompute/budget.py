"""Chooses values to recompute or offload, so that the peak of a step stays within a budget at the least cost.

The frontier of a graph is one sequence of growing plans, which does not depend on the budget. Each round looks at the
peak of the step under the last plan, and takes those of the values that are idle at the peak which free most bytes per
millisecond. Values outside of the transformer layers, which the backward needs at once, are taken last.

A budget takes the first plan of the frontier that it holds. A smaller budget recomputes all that a larger one does.
If values can be offloaded, there is a second frontier that recomputes or offloads. A budget takes the cheaper plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from torch import fx

from ort_accel.config.values import bytes_in
from ort_accel.errors import OrtAccelError
from ort_accel.recompute.cost import node_ms
from ort_accel.recompute.offload import OffloadSite
from ort_accel.recompute.peak_memory import StepMemory
from ort_accel.recompute.plans import RecomputeSite

ROUNDS = 16
"""Each round frees about this fraction of the transient peak without recompute."""

Candidate = RecomputeSite | OffloadSite


@dataclass(frozen=True)
class MemoryPlan:
    """A plan for the values that a forward would save."""

    recomputed: frozenset[fx.Node] = frozenset()
    moved: frozenset[str] = frozenset()
    """Names of the values that are offloaded."""
    packs_masks: bool = False


Predict = Callable[[MemoryPlan], StepMemory]
"""Predicts the memory of a step under a plan."""


@dataclass(frozen=True)
class FrontierPoint:
    """A plan and the predicted memory of its step."""

    chosen: MemoryPlan
    step: StepMemory
    sites: tuple[RecomputeSite, ...] = ()
    """The sites that are recomputed for the budget."""

    @property
    def cost_ms(self) -> float:
        """Milliseconds that the plan adds to a step, by the cost model."""
        return sum(map(node_ms, self.chosen.recomputed)) + self.step.overhead_ms


def frontier(
    candidates: Sequence[Sequence[Candidate]], always: Collection[fx.Node], predict: Predict, has_masks: bool = False
) -> Iterator[FrontierPoint]:
    """Yields growing plans that recompute `always`: masks are packed first, each list before the next one."""
    plan = MemoryPlan(frozenset(always))
    point = FrontierPoint(plan, predict(plan))
    yield point
    wanted_bytes, left = point.step.peak.bytes // ROUNDS, candidates
    if has_masks:
        plan = replace(plan, packs_masks=True)
        point = FrontierPoint(plan, predict(plan))
        yield point
    while True:
        found = (_best_candidates(some, point.step.peak.idle, plan.moved, wanted_bytes) for some in left)
        taken = next(filter(None, found), None)
        if taken is None:
            return
        values = _values(taken)
        left = [[candidate for candidate in some if not values.intersection(_values([candidate]))] for some in left]
        sites = [candidate for candidate in taken if isinstance(candidate, RecomputeSite)]
        offloaded = plan.moved.union(candidate.name for candidate in taken if isinstance(candidate, OffloadSite))
        recomputed = plan.recomputed.union(*(site.nodes for site in sites))
        plan = replace(plan, recomputed=recomputed, moved=offloaded)
        point = FrontierPoint(plan, predict(plan), (*point.sites, *sites))
        yield point


def limit_bytes(budget: str | float, first: FrontierPoint) -> int:
    """Returns a budget in bytes; a share is one of the peak at the first point of the frontier."""
    return int(budget * first.step.peak_bytes) if isinstance(budget, float) else bytes_in(budget)


def fit_budget(budget: str | float, frontiers: Sequence[Iterator[FrontierPoint]]) -> list[FrontierPoint]:
    """Returns the cheapest frontier up to its first point within a budget; an error names the smallest one that is."""
    tried = [[next(points)] for points in frontiers]
    limit = limit_bytes(budget, tried[0][0])
    for so_far, points in zip(tried, frontiers, strict=True):
        while so_far[-1].step.peak_bytes > limit and (following := next(points, None)) is not None:
            so_far.append(following)
    held = [so_far for so_far in tried if so_far[-1].step.peak_bytes <= limit]
    if not held:
        raise _infeasible(budget, limit, [point for so_far in tried for point in so_far], offloads=len(tried) > 1)
    return min(held, key=lambda so_far: so_far[-1].cost_ms)


def _values(candidates: Iterable[Candidate]) -> set[fx.Node]:
    return {value.node for candidate in candidates for value in candidate.saved}


def _bytes_per_ms(candidate: Candidate, offloaded: Collection[str]) -> float:
    """Returns the bytes that a candidate frees for a millisecond, beside values that are offloaded already."""
    cost_ms = candidate.cost_ms if isinstance(candidate, RecomputeSite) else candidate.added_ms(offloaded)
    return candidate.saved_bytes / max(cost_ms, 1e-3)


def _best_candidates(
    candidates: Sequence[Candidate], live: Collection[str], offloaded_before: Collection[str], wanted_bytes: int
) -> list[Candidate]:
    """Returns the candidates that free most live bytes per millisecond, until they free the wanted bytes."""
    offloaded, taken = set(offloaded_before), list[Candidate]()
    queue = [(-_bytes_per_ms(item, offloaded), index) for index, item in enumerate(candidates) if _freed(item, live)]
    heapify(queue)
    freed = 0
    while queue and freed < wanted_bytes:
        _, index = heappop(queue)
        candidate = candidates[index]
        if _values(taken).intersection(_values([candidate])):
            continue
        worth = _bytes_per_ms(candidate, offloaded)  # the more is offloaded, the longer the next copy waits
        if queue and worth < -queue[0][0]:
            heappush(queue, (-worth, index))
            continue
        taken.append(candidate)
        offloaded.update([candidate.name] if isinstance(candidate, OffloadSite) else ())
        freed += _freed(candidate, live)
    return taken


def _freed(candidate: Candidate, live: Collection[str]) -> int:
    """Returns the bytes of live values that a candidate frees."""
    return sum(value.bytes for value in candidate.saved if value.node.name in live)


def _infeasible(budget: str | float, limit: int, tried: Sequence[FrontierPoint], offloads: bool) -> OrtAccelError:
    least = min(point.step.peak_bytes for point in tried)
    moved = " or moved" if offloads else ""
    first = tried[0].step
    smallest = (
        f"{-(-least * 100 // first.peak_bytes) / 100}" if isinstance(budget, float) else f"{-(-least // 2**20)}MiB"
    )
    return OrtAccelError(
        f"memory.budget: {budget} allows {limit / 2**20:,.1f} MiB, and a step takes {least / 2**20:,.1f} MiB even with "
        f"everything computed again{moved} that can be, of which parameters, inputs and optimizer states are "
        f"{first.resident_bytes / 2**20:,.1f} MiB; the smallest budget that can be kept is {smallest}; write that or "
        "more, or take a smaller batch"
    )
