"""Experts: each token goes through a few of many feed-forward parts, those that a router chose for it.

transformers sorts the pairs of token and expert by expert, multiplies each group with the weights of its expert, and
puts the results back into order. That mixes rows, but no row depends on another one: with fewer tokens there are fewer
pairs to sort. So the way from the sort to the sum over a token's experts is taken as one operator, which works row by
row if everything between does so for pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from ort_accel.graph.nodes import is_part, is_random, op_name
from ort_accel.graph.requires_grad import has_gradient, is_cut_off
from ort_accel.graph.symbolic_sizes import known_equal
from ort_accel.kernels.packed_rows import own
from ort_accel.row_skipping.row_flow import Dims, Passage, Source, rank_of, value_of

aten = torch.ops.aten

GROUPED_PRODUCTS = {"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}
"""Products of groups of rows, each with a matrix of its own: of rows, matrices, and where each group ends."""

OTHER_FORM = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
COUNTED = {aten.to.dtype, aten._to_copy.default, aten.histc.default, aten.cumsum.default}
"""What makes the ends of groups from the sorted numbers of experts."""
WRITTEN = {aten.index_put.default, aten.index_put_.default}

Rule = Callable[[fx.Node, Dims], Passage | None]


@dataclass(frozen=True)
class _Order:
    """The sort of pairs by their expert."""

    sort: fx.Node
    chosen: fx.Node
    """The experts of each token."""
    sorted: fx.Node
    """The number of each pair's expert, in order."""
    place: fx.Node
    """Which pair stands at each place of the order."""


def experts(node: fx.Node, dims: Dims, rule: Rule) -> Passage | None:
    """The way from tokens and what the router chose to a sum over the experts of each token; `rule` tells what is done
    to each pair on that way."""
    if node.target is not aten.sum.dim_IntList or node.args[1:] != ([1],) or dims != (0,) or node.kwargs:
        return None
    pairs: Any = node.args[0]
    back: Any = pairs.args[0] if pairs.target in OTHER_FORM and rank_of(pairs) == 3 else None
    taken = _taken(back)
    order = _order_behind(taken[1]) if taken else None
    if taken is None or order is None or not _holds_tokens(pairs, order):
        return None
    found = _Way(order, rule, has_gradient(node))
    return found.passage(pairs, taken[0]) if found.follow(taken[0]) else None


def _taken(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """What rows are taken of, and the tensor that lists them."""
    if not isinstance(node, fx.Node) or node.target is not aten.index.Tensor:
        return None
    table: Any
    indices: Any
    table, indices = node.args
    return (table, indices[0]) if len(indices) == 1 and rank_of(indices[0]) == 1 else None


def _order_behind(back: fx.Node) -> _Order | None:
    """The sort whose order a tensor undoes: it says at which place of the order each pair stands."""
    if back.target not in WRITTEN or len(back.args) != 3 or back.kwargs:
        return None
    places, count = cast("tuple[Any, Any]", back.args[1:])
    place = places[0] if len(places) == 1 else None
    sort: Any = place.args[0] if place is not None and is_part(place) and place.args[1] == 1 else None
    if count.target is not aten.arange.default or sort is None or sort.target is not aten.sort.default:
        return None
    flat: Any = sort.args[0]
    if (
        len(sort.args) > 1
        or sort.kwargs
        or flat.target not in OTHER_FORM
        or rank_of(flat) != 1
        or rank_of(flat.args[0]) != 2
    ):
        return None
    in_order = next((user for user in sort.users if is_part(user) and user.args[1] == 0), None)
    return _Order(sort, flat.args[0], in_order, place) if in_order is not None else None


def _holds_tokens(pairs: fx.Node, order: _Order) -> bool:
    """Whether a value has a place for each token and each of its experts."""
    sizes = zip(value_of(pairs).shape, value_of(order.chosen).shape, strict=False)
    return all(known_equal(one, other) for one, other in sizes)


@dataclass
class _Way:
    """What happens between the sort and the sum."""

    order: _Order
    rule: Rule
    has_gradient: bool
    makes: dict[fx.Node, Callable[[_Pairs], Any]] = field(default_factory=dict)
    """How each value that has a row for each pair is made, in an order in which that works."""
    needs: dict[fx.Node, Dims] = field(default_factory=dict)
    reads: set[fx.Node] = field(default_factory=set)

    def follow(self, node: Any) -> bool:
        """Go back from a value to what it is made of; whether each of its rows belongs to one pair."""
        if node in self.makes:
            return True
        if not isinstance(node, fx.Node) or node.op != "call_function" or is_random(node):
            return False
        if self.has_gradient and is_cut_off(node):  # all of it is made anew where gradients are recorded
            return False
        make = self._sorted(node) or self._of_tokens(node) or self._of_experts(node) or self._step(node)
        if make is not None:
            self.makes[node] = make
        return make is not None

    def _sorted(self, node: fx.Node) -> Callable[[_Pairs], Any] | None:
        return (lambda pairs: pairs.numbers) if node is self.order.sorted else None

    def _of_tokens(self, node: fx.Node) -> Callable[[_Pairs], Any] | None:
        """What a token has, or what it has for one of its experts."""
        if (taken := _taken(node)) is None:
            return None
        table, places = taken
        if places is self.order.place and table.target in OTHER_FORM and rank_of(table) == 1:
            weights: Any = table.args[0]
            if rank_of(weights) != 2 or not _holds_tokens(weights, self.order):
                return None
            self.needs[weights] = (0,)
            return lambda pairs: own.rows_of(pairs.source.packed(weights).reshape(-1), pairs.order, pairs.back)
        if self._counts_tokens(places) and known_equal(value_of(table).shape[0], value_of(self.order.chosen).shape[0]):
            self.needs[table] = (0,)
            return lambda pairs: pairs.source.packed(table)[pairs.order // pairs.each]
        return None

    def _counts_tokens(self, places: fx.Node) -> bool:
        """Whether a tensor says which token the pair at each place of the order has."""
        each = value_of(self.order.chosen).shape[1]
        is_divided = places.target is aten.floor_divide.default and not places.kwargs
        return is_divided and places.args[0] is self.order.place and known_equal(places.args[1], each)

    def _of_experts(self, node: fx.Node) -> Callable[[_Pairs], Any] | None:
        """What an expert has, such as its bias."""
        taken = _taken(node)
        if taken is None or taken[1] is not self.order.sorted or not self._is_outside(taken[0]):
            return None
        self.reads.add(taken[0])
        return lambda pairs: pairs.source.dense(taken[0])[pairs.numbers]

    def _step(self, node: fx.Node) -> Callable[[_Pairs], Any] | None:
        """What is made of other values of the pair."""
        if op_name(node) in GROUPED_PRODUCTS:
            return self._product(node)
        if is_part(node):
            whole: Any = node.args[0]
            return (lambda pairs: pairs.of[whole][node.args[1]]) if self.follow(whole) else None
        how = self.rule(node, (0,))
        others = [given for given in node.all_input_nodes if how and given not in how.needs and given not in how.unread]
        if how is None or how.reads or set(how.needs.values()) != {(0,)} or not all(map(self._is_outside, others)):
            return None
        if not all(map(self.follow, how.needs)):
            return None
        self.reads |= {*others}
        return how.make

    def _product(self, node: fx.Node) -> Callable[[_Pairs], Any] | None:
        given: list[Any] = [*node.args, *node.kwargs.values()]
        if len(given) != 3:
            return None
        rows, weights, ends = given
        if not self._is_outside(weights) or not self.follow(rows):
            return None
        counting = self._counting(ends)
        if counting is None:
            return None
        self.reads.add(weights)

        def make(pairs: _Pairs) -> Tensor:
            if ends not in pairs.of:
                pairs.of[ends] = counting(pairs.numbers)
            return _call(node, pairs.of[rows], pairs.source.dense(weights), pairs.of[ends])

        return make

    def _counting(self, ends: Any) -> Callable[[Tensor], Tensor] | None:
        """How the ends of groups follow from the sorted numbers of experts."""
        steps: list[fx.Node] = []
        while ends is not self.order.sorted:
            if not isinstance(ends, fx.Node) or ends.target not in COUNTED or len(ends.all_input_nodes) != 1:
                return None
            steps.append(ends)
            ends = ends.args[0]
        if aten.histc.default not in {step.target for step in steps}:
            return None

        def count(numbers: Tensor) -> Tensor:
            for step in reversed(steps):
                numbers = _call(step, numbers, *step.args[1:], **step.kwargs)
            return numbers

        return count

    def _is_outside(self, node: Any) -> bool:
        """Whether a value has nothing to do with the order of the pairs."""
        pending, seen = [node], set[fx.Node]()
        while pending:
            current = pending.pop()
            if current is self.order.sort or current is self.order.chosen:
                return False
            if isinstance(current, fx.Node) and current not in seen:
                seen.add(current)
                pending += current.all_input_nodes
        return True

    def passage(self, pairs: fx.Node, last: fx.Node) -> Passage:
        """All of it as one step."""

        def make(source: Source) -> Tensor:
            chosen = source.packed(self.order.chosen)
            numbers, order = torch.sort(chosen.reshape(-1))
            back = torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
            found = _Pairs(source, chosen.shape[1], numbers, order, back, {})
            for node, step in self.makes.items():
                found.of[node] = step(found)
            width = value_of(last).shape[1]
            return own.rows_of(found.of[last], back, order).view(chosen.shape[0], chosen.shape[1], width).sum(1)

        needs = {self.order.chosen: (0,), **self.needs}
        return Passage(needs, make, frozenset([pairs]), frozenset(self.reads), tuple(self.makes))


def _call(node: fx.Node, *args: Any, **kwargs: Any) -> Tensor:
    """A node's operator with other arguments."""
    run: Any = node.target
    made: Tensor = run(*args, **kwargs)
    return made


@dataclass(frozen=True)
class _Pairs:
    """Pairs of token and expert while a smaller graph is written; the inputs of what works on them."""

    source: Source
    each: int
    """How many experts a token has."""
    numbers: Tensor
    """The expert of each pair, in order."""
    order: Tensor
    back: Tensor
    of: dict[fx.Node, Any]
    """What was made of them so far."""

    def packed(self, node: fx.Node) -> Any:
        """A value that has a row for each pair."""
        return self.of[node]

    def dense(self, value: Any) -> Any:
        """Anything else."""
        return self.source.dense(value)

    def along(self, value: Tensor, dim: int, axis: int) -> Tensor:
        """Pairs lie along one dimension, so that nothing changes along a part of them."""
        raise AssertionError(f"{value.shape} changes along dimension {dim}, axis {axis} of pairs")
