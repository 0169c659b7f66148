"""Finds the nodes that inputs alone determine, and writes a graph that computes labels and masks before the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import fx
from torch.fx.node import Argument

from ort_accel.graph.nodes import is_getitem, is_random, is_view, op_name, writes
from ort_accel.graph.requires_grad import has_gradient
from ort_accel.row_skipping.attention_match import Attention, ScoreMask
from ort_accel.row_skipping.mutation import is_in_place, mutated_groups
from ort_accel.row_skipping.row_flow import shape_of, tensor_input, value_of

aten = torch.ops.aten

EXPENSIVE = ("linear", "mm", "matmul", "convolution", "scaled_dot_product", "layer_norm")


def input_only_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that are computed from inputs alone: cheap, deterministic, and from values without gradient.

    A tensor that the graph writes into is one of them if nodes read it after the last write only.
    """
    return _input_nodes(graph)[1]


def _input_nodes(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Returns all nodes that inputs determine, and those of them that others read with their final value alone."""
    groups = mutated_groups(graph)
    position = {node: number for number, node in enumerate(graph.nodes)}
    computable = _computable(graph, groups)
    return computable, computable - {node for group in groups for node in _read_early(group, position)}


def _computable(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]]) -> set[fx.Node]:
    """Returns all nodes that inputs determine, whenever they are read."""
    unknown: set[fx.Node] = set()
    while True:
        found: set[fx.Node] = set()
        for node in graph.nodes:
            if node not in unknown and _is_input_only(node, found):
                found.add(node)
        written = {node for group in groups if not _are_writes_known(group, found) for node in group} & found
        if not written:
            return found
        unknown |= written


def _are_writes_known(group: Sequence[fx.Node], found: set[fx.Node]) -> bool:
    """True if the graph allocated the memory that nodes share, and inputs determine each write."""
    return group[0].op == "call_function" and all(node in found for node in group if is_in_place(node))


def _read_early(group: Sequence[fx.Node], position: dict[fx.Node, int]) -> list[fx.Node]:
    """Returns the nodes of shared memory that others read before the last write."""
    last_write = max(position[node] for node in group if is_in_place(node))
    return [node for node in group if any(position[user] < last_write for user in node.users if user not in group)]


def _is_input_only(node: fx.Node, found: set[fx.Node]) -> bool:
    if node.op in {"placeholder", "get_attr"}:
        return True
    if node.op != "call_function" or any(item not in found or has_gradient(item) for item in node.all_input_nodes):
        return False
    name = op_name(node)
    plain = is_getitem(node) or not writes(node) or isinstance(node.target, torch._ops.OpOverload)
    is_python = getattr(node.target, "__module__", "") in {"_operator", "math"}
    return (plain or is_python) and not is_random(node) and not any(part in name for part in EXPENSIVE)


def is_view_of_input(node: Argument) -> bool:
    """True if a value is an input, or a view of one."""
    while isinstance(node, fx.Node) and node.op == "call_function" and is_view(node):
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op in {"placeholder", "get_attr"}


class InputGraphWriter:
    """Writes a graph of the nodes that inputs alone determine, and of the pairs that attention masks allow."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._owner, self._graph = module, fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        computable, input_only = _input_nodes(module.graph)
        copies: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes:
            if node in computable:
                copies[node] = self._graph.node_copy(node, copies.__getitem__)
                if node in input_only:
                    self._copies[node] = copies[node]

    def is_known(self, node: fx.Node) -> bool:
        """True if a value can be computed before the graph runs."""
        return node in self._copies and not has_gradient(node)

    def allowed_by(self, attention: Attention) -> fx.Node | None:
        """Returns a node that computes which keys a query may attend to; None if all keys or if it is not known."""
        if attention.mask is not None:
            is_condition = value_of(attention.mask).dtype == torch.bool
            return self._copies.get(attention.mask) if is_condition else self._allowed_by_mask(attention.mask)
        found: list[fx.Node] = []
        for mask in attention.score_masks:
            allowed = self._allowed_by_score_mask(mask)
            if allowed is not None:
                found.append(allowed)
            elif not _is_addition(mask.node):  # it may show scores again that an earlier operator masked
                break
        return reduce(self._and, found) if found else None

    def _allowed_by_score_mask(self, mask: ScoreMask) -> fx.Node | None:
        """Returns which scores an operator does not mask; None where that is not known."""
        lowest = torch.finfo(value_of(mask.node).dtype).min / 2
        if _is_addition(mask.node):
            (added,) = mask.other_arguments
            return self._allowed_by_mask(added) if isinstance(added, fx.Node) and shape_of(added) else None
        condition, fill = mask.other_arguments  # `where` keeps scores where it holds; `masked_fill` where it does not
        if not isinstance(condition, fx.Node) or condition not in self._copies or not _fills_low(fill, lowest):
            return None
        keeps_where_true = _packet_of(mask.node) is aten.where and mask.scores_position == 1
        return self._copies[condition] if keeps_where_true else self._not(self._copies[condition])

    def _allowed_by_mask(self, mask: fx.Node) -> fx.Node | None:
        """Returns which scores a mask that is added to them leaves; None where that is not known."""
        value = value_of(mask)
        if not value.is_floating_point():
            return None  # 0 and 1 hide nothing
        lowest = torch.finfo(value.dtype).min / 2
        packet = _packet_of(mask)
        if packet is aten.where and _is_low(mask.args[2], lowest):
            return self._both(self._copies.get(tensor_input(mask)), mask.args[1], lowest)
        if packet is aten.masked_fill and _is_low(mask.args[2], lowest) and mask.args[1] in self._copies:
            return self._both(self._not(self._copies[tensor_input(mask, 1)]), mask.args[0], lowest)
        if packet in {aten.contiguous, aten.clone, aten.to}:
            return self._allowed_by_mask(tensor_input(mask))
        if packet is aten.add and all(isinstance(item, fx.Node) for item in mask.args):
            masks = [item for item in mask.args if isinstance(item, fx.Node) and not has_gradient(item)]
            return self._both(self._allowed_by_mask(masks[0]), masks[-1], lowest) if masks else None
        return self._graph.call_function(aten.gt.Scalar, (self._copies[mask], lowest)) if self.is_known(mask) else None

    def _both(self, allowed: fx.Node | None, other: Argument, lowest: float) -> fx.Node | None:
        """Returns the pairs that both masks allow; a learned bias hides nothing. None where the pairs are not known."""
        if not isinstance(other, fx.Node):
            return None if _is_low(other, lowest) else allowed
        if has_gradient(other):
            return allowed
        found = self._allowed_by_mask(other)
        return None if allowed is None or found is None else self._and(allowed, found)

    def _and(self, one: fx.Node, other: fx.Node) -> fx.Node:
        return self._graph.call_function(aten.logical_and.default, (one, other))

    def _not(self, node: fx.Node) -> fx.Node:
        return self._graph.call_function(aten.logical_not.default, (node,))

    def finish(self, tensors: Sequence[fx.Node], masks: Sequence[fx.Node | None]) -> fx.GraphModule:
        """Returns the module that computes tensors and masks. The model's own asserts stay in the model's graph."""
        self._graph.output([*(self._copies.get(node) for node in tensors), *masks])
        self._graph.eliminate_dead_code(lambda node: node.op in {"placeholder", "output"} or is_in_place(node))
        return fx.GraphModule(self._owner, self._graph)


def _packet_of(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


def _is_addition(node: fx.Node) -> bool:
    return _packet_of(node) in {aten.add, aten.add_}


def _fills_low(fill: Argument, lowest: float) -> bool:
    """True if a number is low, or a tensor that holds one low number."""
    if isinstance(fill, fx.Node) and fill.target in {aten.full.default, aten.scalar_tensor.default}:
        return _is_low(fill.args[-1], lowest)
    return _is_low(fill, lowest)


def _is_low(value: Argument, lowest: float) -> bool:
    return isinstance(value, int | float) and value <= lowest
