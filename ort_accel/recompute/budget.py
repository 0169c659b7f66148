"""Choosing what to compute again so that the peak of a step stays within a budget, at the least cost.

One sequence of ever larger choices is made for a graph, whatever the budget: each round looks at the highest moments
of the step as it would be, and takes those places whose values are alive then and that free most bytes for a
millisecond. A budget takes the first choice of the sequence that it holds. So a smaller budget computes again whatever
a larger one does, and never takes more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from ort_accel.config.values import bytes_in
from ort_accel.errors import OrtAccelError
from ort_accel.recompute.cost import milliseconds
from ort_accel.recompute.plans import Place
from ort_accel.recompute.timeline import Timeline

ROUNDS = 16
"""Each round frees about such a part of what is alive at the highest moment when nothing is computed again."""

Foresee = Callable[[Collection[fx.Node]], Timeline]
"""Tells how a step would go with these operators computed again."""


@dataclass(frozen=True)
class Choice:
    """Places that are computed again, what that takes, and how the step goes then."""

    places: tuple[Place, ...]
    nodes: frozenset[fx.Node]
    step: Timeline

    @property
    def cost(self) -> float:
        """Milliseconds a step, as the cost model has it."""
        return sum(map(milliseconds, self.nodes))


def choices(places: Sequence[Place], always: Collection[fx.Node], foresee: Foresee) -> Iterator[Choice]:
    """Ever larger choices, from none of the places on; `always` is computed again in any case."""
    choice = Choice((), frozenset(always), foresee(always))
    step = choice.step.own // ROUNDS
    left = sorted(places, key=lambda place: -_worth(place))
    while True:
        yield choice
        live = set[str]().union(*(moment.live for moment in choice.step.highest))
        taken = _most_worth(left, live, step)
        if not taken:
            return
        left = [place for place in left if place not in taken]
        nodes = choice.nodes.union(*(place.nodes for place in taken))
        choice = Choice((*choice.places, *taken), nodes, foresee(nodes))


def within(budget: str | float, sequence: Iterator[Choice]) -> list[Choice]:
    """The choices up to the first one that a budget holds; an error with the smallest budget where it holds none."""
    tried = [next(sequence)]
    limit = int(budget * tried[0].step.peak) if isinstance(budget, float) else bytes_in(budget)
    while tried[-1].step.peak > limit:
        following = next(sequence, None)
        if following is None:
            raise _infeasible(budget, limit, tried)
        tried.append(following)
    return tried


def _worth(place: Place) -> float:
    """Bytes that are freed for a millisecond."""
    return place.hint / max(place.cost, 1e-3)


def _most_worth(left: Sequence[Place], live: Collection[str], wanted: int) -> list[Place]:
    """The places that are worth most among those that free what is alive, until they free as much as is wanted."""
    taken: list[Place] = []
    freed = 0
    for place in left:
        bytes_freed = sum(kept.hint for kept in place.saved if kept.node.name in live)
        if bytes_freed and freed < wanted:
            taken.append(place)
            freed += bytes_freed
    return taken


def _infeasible(budget: str | float, limit: int, tried: Sequence[Choice]) -> OrtAccelError:
    least = min(choice.step.peak for choice in tried)
    whole = tried[0].step
    smallest = f"{-(-least * 100 // whole.peak) / 100}" if isinstance(budget, float) else f"{-(-least // 2**20)}MiB"
    return OrtAccelError(
        f"memory.budget: {budget} allows {limit / 2**20:,.1f} MiB, and a step takes {least / 2**20:,.1f} MiB even with "
        f"everything computed again that can be, of which parameters, inputs and optimizer states are "
        f"{whole.resident / 2**20:,.1f} MiB; the smallest budget that can be kept is {smallest}; write that or more, "
        "or take a smaller batch"
    )
