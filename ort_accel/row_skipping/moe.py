"""Matches a mixture of experts: each token passes through the few experts that a router chose for it.

transformers sorts the pairs of token and expert by expert, multiplies each group by the weights of its expert, and
restores the order. This mixes rows, but no pair depends on another one, and fewer tokens are fewer pairs. All nodes
from the sort to the sum over a token's experts are matched as one step, if each works pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ort_accel.graph.nodes import is_getitem, is_random, op_name
from ort_accel.graph.requires_grad import has_gradient, is_cut_off
from ort_accel.graph.symbolic_sizes import Size, known_equal
from ort_accel.kernels.packed_rows import own
from ort_accel.row_skipping.row_flow import (
    Dims,
    Propagation,
    Rule,
    RuleInputs,
    call_operator,
    rank_of,
    tensor_input,
    value_of,
)

aten = torch.ops.aten

GROUPED_PRODUCTS = {"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}
"""Grouped matrix products: their arguments are rows, one matrix for each group, and the end of each group."""

RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
COUNTING = {aten.to.dtype, aten._to_copy.default, aten.histc.default, aten.cumsum.default}
"""Operators that compute the ends of groups from the sorted expert ids."""
INDEX_PUTS = {aten.index_put.default, aten.index_put_.default}


@dataclass(frozen=True)
class _ExpertSort:
    """The sort of pairs by expert."""

    node: fx.Node
    routing: fx.Node
    """The expert ids of each token: [tokens, experts of a token]."""
    expert_ids: fx.Node
    """The expert id of each pair, sorted."""
    order: fx.Node
    """The pair at each position of the sorted order."""


def match_moe(node: fx.Node, dims: Dims, rule: Rule) -> Propagation | None:
    """Returns the experts whose outputs a node sums for each token; `rule` tells how one node passes pairs on."""
    if node.target is not aten.sum.dim_IntList or node.args[1:] != ([1],) or dims != (0,) or node.kwargs:
        return None
    pairs = tensor_input(node)
    restored = pairs.args[0] if pairs.target in RESHAPES and rank_of(pairs) == 3 else None
    indexed = _indexed_rows(restored)
    sort = _find_sort(indexed[1]) if indexed else None
    if indexed is None or sort is None or not _has_pairs(pairs, sort):
        return None
    matcher = _MoeMatcher(sort, rule, has_gradient(node))
    return matcher.propagation(pairs, indexed[0]) if matcher.trace(indexed[0]) else None


def _indexed_rows(node: Argument) -> tuple[fx.Node, fx.Node] | None:
    """Returns source and index of an operator that gathers rows."""
    if not isinstance(node, fx.Node) or node.target is not aten.index.Tensor:
        return None
    index, *more = cast("list[fx.Node]", node.args[1])
    return (tensor_input(node), index) if not more and rank_of(index) == 1 else None


def _find_sort(inverse: fx.Node) -> _ExpertSort | None:
    """Returns the sort whose order an index inverts."""
    if inverse.target not in INDEX_PUTS or len(inverse.args) != 3 or inverse.kwargs:
        return None
    positions, count = cast("tuple[list[fx.Node], fx.Node]", inverse.args[1:])
    if len(positions) != 1 or not is_getitem(positions[0]) or positions[0].args[1] != 1:
        return None
    sort = tensor_input(positions[0])
    if count.target is not aten.arange.default or sort.target is not aten.sort.default:
        return None
    flat = tensor_input(sort)
    if len(sort.args) > 1 or sort.kwargs or flat.target not in RESHAPES or rank_of(flat) != 1:
        return None
    routing = tensor_input(flat)
    expert_ids = next((user for user in sort.users if is_getitem(user) and user.args[1] == 0), None)
    if rank_of(routing) != 2 or expert_ids is None:
        return None
    return _ExpertSort(sort, routing, expert_ids, positions[0])


def _has_pairs(value: fx.Node, sort: _ExpertSort) -> bool:
    """True if a value has an entry for each token and each of its experts."""
    sizes = zip(value_of(value).shape, value_of(sort.routing).shape, strict=False)
    return all(known_equal(one, other) for one, other in sizes)


@dataclass
class _MoeMatcher:
    """Traces the nodes between the sort and the sum."""

    sort: _ExpertSort
    rule: Rule
    has_gradient: bool
    steps: dict[fx.Node, Callable[[_RoutedPairs], Any]] = field(default_factory=dict)
    """Computes each value that has a row for each pair; in topological order."""
    row_dims: dict[fx.Node, Dims] = field(default_factory=dict)
    read_in_full: set[fx.Node] = field(default_factory=set)

    def trace(self, node: Argument) -> bool:
        """Traces a value back; True if each of its rows belongs to one pair."""
        if not isinstance(node, fx.Node) or node.op != "call_function" or is_random(node):
            return False
        if node in self.steps:
            return True
        if self.has_gradient and is_cut_off(node):  # the step is computed with gradients throughout
            return False
        step = self._match_ids(node) or self._match_gather(node) or self._match_expert(node) or self._match_rule(node)
        if step is not None:
            self.steps[node] = step
        return step is not None

    def _match_ids(self, node: fx.Node) -> Callable[[_RoutedPairs], Any] | None:
        return (lambda pairs: pairs.expert_ids) if node is self.sort.expert_ids else None

    def _match_gather(self, node: fx.Node) -> Callable[[_RoutedPairs], Any] | None:
        """Matches a gather of tokens, or of routing weights, into the sorted order."""
        if (indexed := _indexed_rows(node)) is None:
            return None
        source, index = indexed
        if index is self.sort.order and source.target in RESHAPES and rank_of(source) == 1:
            weights = tensor_input(source)
            if rank_of(weights) != 2 or not _has_pairs(weights, self.sort):
                return None
            self.row_dims[weights] = (0,)
            return lambda pairs: own.rows_of(pairs.inputs.packed(weights).reshape(-1), pairs.order, pairs.inverse)
        has_tokens = known_equal(value_of(source).shape[0], value_of(self.sort.routing).shape[0])
        if self._is_token_index(index) and has_tokens:
            self.row_dims[source] = (0,)
            return lambda pairs: pairs.inputs.packed(source)[pairs.order // pairs.experts_per_token]
        return None

    def _is_token_index(self, index: fx.Node) -> bool:
        """True if an index is the token of each sorted pair."""
        if index.target is not aten.floor_divide.default or index.kwargs or index.args[0] is not self.sort.order:
            return False
        return known_equal(cast("Size", index.args[1]), value_of(self.sort.routing).shape[1])

    def _match_expert(self, node: fx.Node) -> Callable[[_RoutedPairs], Any] | None:
        """Matches a gather of expert parameters, such as biases."""
        indexed = _indexed_rows(node)
        if indexed is None or indexed[1] is not self.sort.expert_ids or not self._is_independent(indexed[0]):
            return None
        source = indexed[0]
        self.read_in_full.add(source)
        return lambda pairs: pairs.inputs.dense(source)[pairs.expert_ids]

    def _match_rule(self, node: fx.Node) -> Callable[[_RoutedPairs], Any] | None:
        """Matches a node that works pair by pair."""
        if op_name(node) in GROUPED_PRODUCTS:
            return self._match_grouped_product(node)
        if is_getitem(node):
            whole, index = tensor_input(node), node.args[1]
            return (lambda pairs: pairs.values[whole][index]) if self.trace(whole) else None
        step = self.rule(node, (0,))
        if step is None or step.read_in_full or set(step.row_dims.values()) != {(0,)}:
            return None
        others = [item for item in node.all_input_nodes if item not in step.row_dims and item not in step.unread]
        if not all(map(self._is_independent, others)) or not all(map(self.trace, step.row_dims)):
            return None
        self.read_in_full |= {*others}
        return step.compute

    def _match_grouped_product(self, node: fx.Node) -> Callable[[_RoutedPairs], Any] | None:
        arguments = [*node.args, *node.kwargs.values()]
        if len(arguments) != 3:
            return None
        rows, weights, ends = cast("list[fx.Node]", arguments)
        if not self._is_independent(weights) or not self.trace(rows):
            return None
        count = self._match_counting(ends)
        if count is None:
            return None
        self.read_in_full.add(weights)

        def compute(pairs: _RoutedPairs) -> Any:
            if ends not in pairs.values:
                pairs.values[ends] = count(pairs.expert_ids)
            return call_operator(node, pairs.values[rows], pairs.inputs.dense(weights), pairs.values[ends])

        return compute

    def _match_counting(self, ends: Argument) -> Callable[[Tensor], Tensor] | None:
        """Returns how the ends of groups follow from the sorted expert ids."""
        nodes: list[fx.Node] = []
        while ends is not self.sort.expert_ids:
            if not isinstance(ends, fx.Node) or ends.target not in COUNTING or len(ends.all_input_nodes) != 1:
                return None
            nodes.append(ends)
            ends = ends.args[0]
        if aten.histc.default not in {node.target for node in nodes}:
            return None

        def count(expert_ids: Tensor) -> Tensor:
            for node in reversed(nodes):
                expert_ids = call_operator(node, expert_ids, *node.args[1:], **node.kwargs)
            return expert_ids

        return count

    def _is_independent(self, node: Argument) -> bool:
        """True if a value depends on neither the sort nor the routing."""
        pending, seen = [node], set[fx.Node]()
        while pending:
            current = pending.pop()
            if current is self.sort.node or current is self.sort.routing:
                return False
            if isinstance(current, fx.Node) and current not in seen:
                seen.add(current)
                pending += current.all_input_nodes
        return True

    def propagation(self, summed: fx.Node, last: fx.Node) -> Propagation:
        """Returns all steps as one."""

        def compute(inputs: RuleInputs) -> Tensor:
            routing = inputs.packed(self.sort.routing)
            expert_ids, order = torch.sort(routing.reshape(-1))
            inverse = torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
            pairs = _RoutedPairs(inputs, routing.shape[1], expert_ids, order, inverse, {})
            for node, step in self.steps.items():
                pairs.values[node] = step(pairs)
            restored: Tensor = own.rows_of(pairs.values[last], inverse, order)
            return restored.view(routing.shape[0], routing.shape[1], value_of(last).shape[1]).sum(1)

        row_dims = {self.sort.routing: (0,), **self.row_dims}
        return Propagation(row_dims, compute, frozenset([summed]), frozenset(self.read_in_full), tuple(self.steps))


@dataclass(frozen=True)
class _RoutedPairs:
    """The pairs of token and expert while the smaller graph is written; gives rules the values of pairs."""

    inputs: RuleInputs
    experts_per_token: int
    expert_ids: Tensor
    """The expert id of each pair, sorted."""
    order: Tensor
    inverse: Tensor
    values: dict[fx.Node, Any]
    """The values of pairs that are computed so far."""

    def packed(self, node: fx.Node) -> Any:
        return self.values[node]

    def dense(self, value: Argument) -> Any:
        return self.inputs.dense(value)

    def gather_along(self, value: Tensor, dim: int, axis: int) -> Tensor:
        """Rejects values that change along a part of the pairs: pairs lie along one dimension."""
        raise AssertionError(f"{value.shape} changes along dimension {dim}, axis {axis} of pairs")
