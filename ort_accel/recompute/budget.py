"""Choosing what to compute again, or to move to host memory, so that the peak of a step stays within a budget, at the
least cost.

One sequence of ever larger choices is made for a graph, whatever the budget: each round looks at the highest moments
of the step as it would be, and takes those places whose values only wait then and that free most bytes for a
millisecond. Where nothing more can be freed then, what is kept at other moments is taken, too: ONNX Runtime's pool
holds what it held before. What lies outside of layers comes last: most of it is needed at once in the backward. A
budget takes the first choice of the sequence that it holds. So a smaller budget computes again whatever a larger one
does, and never takes more memory.

Where values can be moved to host memory, there is a second sequence, which takes places and moves by what they are
worth. A budget takes the cheaper of the two choices, so that no step costs more for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from torch import fx

from ort_accel.config.values import bytes_in
from ort_accel.errors import OrtAccelError
from ort_accel.recompute.cost import milliseconds
from ort_accel.recompute.offload import Move
from ort_accel.recompute.peak_memory import Timeline
from ort_accel.recompute.plans import Place

ROUNDS = 16
"""Each round frees about such a part of what is alive at the highest moment when nothing is computed again."""

Budgeted = Place | Move


@dataclass(frozen=True)
class Chosen:
    """What becomes of what a forward would keep."""

    nodes: frozenset[fx.Node] = frozenset()
    """Operators that are computed again."""
    moved: frozenset[str] = frozenset()
    """Names of values that go to host memory meanwhile."""
    as_bits: bool = False
    """Of masks the bits alone are kept."""


Foresee = Callable[[Chosen], Timeline]
"""Tells how a step would go."""


@dataclass(frozen=True)
class Choice:
    """What is chosen, the places that are computed again for the budget's sake, and how the step goes then."""

    chosen: Chosen
    step: Timeline
    places: tuple[Place, ...] = ()

    @property
    def cost(self) -> float:
        """Milliseconds a step, as the cost model has it."""
        return sum(map(milliseconds, self.chosen.nodes)) + self.step.keeping


def choices(
    options: Sequence[Sequence[Budgeted]], always: Collection[fx.Node], foresee: Foresee, has_masks: bool = False
) -> Iterator[Choice]:
    """Ever larger choices, from none of the options on; `always` is computed again in any case. Of several lists of
    options one is gone through after the other. Before them all, masks are kept as bits: that costs least."""
    chosen = Chosen(frozenset(always))
    choice = Choice(chosen, foresee(chosen))
    yield choice
    part, left = choice.step.own // ROUNDS, options
    if has_masks:
        chosen = replace(chosen, as_bits=True)
        choice = Choice(chosen, foresee(chosen))
        yield choice
    while True:
        idle = set[str]().union(*(moment.idle for moment in choice.step.highest))
        wishes = [(some, there) for some in left for there in (idle, choice.step.stash)]
        tried = (_most_worth(some, there, chosen.moved, part) for some, there in wishes)
        taken = next(filter(None, tried), None)
        if taken is None:
            return
        values = _values(taken)
        left = [[option for option in some if not values.intersection(_values([option]))] for some in left]
        again = [option for option in taken if isinstance(option, Place)]
        moved = chosen.moved.union(option.name for option in taken if isinstance(option, Move))
        nodes = chosen.nodes.union(*(place.nodes for place in again))
        chosen = replace(chosen, nodes=nodes, moved=moved)
        choice = Choice(chosen, foresee(chosen), (*choice.places, *again))
        yield choice


def within(budget: str | float, sequences: Sequence[Iterator[Choice]]) -> list[Choice]:
    """The choices of a sequence up to the first one that a budget holds, of that sequence where this costs least; an
    error with the smallest budget where none holds."""
    tried = [[next(sequence)] for sequence in sequences]
    limit = int(budget * tried[0][0].step.peak) if isinstance(budget, float) else bytes_in(budget)
    for so_far, sequence in zip(tried, sequences, strict=True):
        while so_far[-1].step.peak > limit and (following := next(sequence, None)) is not None:
            so_far.append(following)
    held = [so_far for so_far in tried if so_far[-1].step.peak <= limit]
    if not held:
        raise _infeasible(budget, limit, [choice for so_far in tried for choice in so_far])
    return min(held, key=lambda so_far: so_far[-1].cost)


def _values(options: Iterable[Budgeted]) -> set[fx.Node]:
    """The values that are not kept any more."""
    return {kept.node for option in options for kept in option.saved}


def _worth(option: Budgeted, moved: Collection[str]) -> float:
    """Bytes that are freed for a millisecond, where these values are moved already."""
    cost = option.cost if isinstance(option, Place) else option.cost_beside(moved)
    return option.hint / max(cost, 1e-3)


def _most_worth(
    left: Sequence[Budgeted], live: Collection[str], moved_before: Collection[str], wanted: int
) -> list[Budgeted]:
    """What is worth most among that which frees what is alive, until it frees as much as is wanted. A value is computed
    again or moved, whichever is worth more."""
    moved, taken = set(moved_before), list[Budgeted]()
    queue = [(-_worth(option, moved), place) for place, option in enumerate(left) if _freed(option, live)]
    heapify(queue)
    freed = 0
    while queue and freed < wanted:
        _, place = heappop(queue)
        option = left[place]
        if _values(taken).intersection(_values([option])):
            continue
        worth = _worth(option, moved)  # a move is worth less with each other one that waits in the same queue
        if queue and worth < -queue[0][0]:
            heappush(queue, (-worth, place))
            continue
        taken.append(option)
        moved.update([option.name] if isinstance(option, Move) else ())
        freed += _freed(option, live)
    return taken


def _freed(option: Budgeted, live: Collection[str]) -> int:
    """Bytes that it frees of what is alive."""
    return sum(kept.hint for kept in option.saved if kept.node.name in live)


def _infeasible(budget: str | float, limit: int, tried: Sequence[Choice]) -> OrtAccelError:
    least = min(choice.step.peak for choice in tried)
    moved = " or moved" if any(choice.chosen.moved for choice in tried) else ""
    whole = tried[0].step
    smallest = f"{-(-least * 100 // whole.peak) / 100}" if isinstance(budget, float) else f"{-(-least // 2**20)}MiB"
    return OrtAccelError(
        f"memory.budget: {budget} allows {limit / 2**20:,.1f} MiB, and a step takes {least / 2**20:,.1f} MiB even with "
        f"everything computed again{moved} that can be, of which parameters, inputs and optimizer states are "
        f"{whole.resident / 2**20:,.1f} MiB; the smallest budget that can be kept is {smallest}; write that or more, "
        "or take a smaller batch"
    )
