"""Walks a forward graph backward and finds which rows of each value are read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from ort_accel.graph.nodes import CHECKS, is_getitem, is_view, op_name, returned, user_line, writes
from ort_accel.graph.requires_grad import has_gradient
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.row_skipping import arithmetic_rules, layout_rules
from ort_accel.row_skipping.attention_match import Attention, match_fused_attention
from ort_accel.row_skipping.ignored_labels import Loss, match_loss
from ort_accel.row_skipping.input_graph import input_only_nodes
from ort_accel.row_skipping.moe import match_moe
from ort_accel.row_skipping.mutation import mutated_nodes
from ort_accel.row_skipping.row_flow import Dims, Propagation, tensor_input, value_of
from ort_accel.row_skipping.row_sets import AllRows, ReadRows, SizeExpression, SomeRows, has_attended_keys, union
from ort_accel.row_skipping.selections import match_masked_tokens, match_selection, match_slice
from ort_accel.row_skipping.unfused_attention import match_unfused_attention

RULES = arithmetic_rules.RULES | layout_rules.RULES
"""The rule of each operator that works row by row: a function of a node and of the dimensions along which rows lie."""

RESULT = "the model's result"
"""The reader of the graph's outputs."""


@dataclass(frozen=True)
class SkippableRows:
    """The features that may leave rows out."""

    labels: bool = True
    padding: bool = True
    upstream: bool = True


@dataclass
class RowAnalysis:
    """The rows that are read of each value; a node that is not in `of` is not read at all."""

    of: dict[fx.Node, ReadRows] = field(default_factory=dict)
    propagations: dict[fx.Node, Propagation] = field(default_factory=dict)
    losses: dict[fx.Node, Loss] = field(default_factory=dict)
    attentions: dict[fx.Node, Attention] = field(default_factory=dict)
    """Attention of which only some queries are needed."""

    def rows(self, node: fx.Node) -> SomeRows | None:
        """Returns the rows that are read of a value; None if all are, or none."""
        found = self.of.get(node)
        return found if isinstance(found, SomeRows) else None


def analyse_rows(graph: fx.Graph, unread: frozenset[int], wishes: SkippableRows) -> RowAnalysis:
    """Returns which rows of each value are read, where the outputs at the positions `unread` are not."""
    return _Analysis(graph, unread, wishes).run()


class _Analysis:
    def __init__(self, graph: fx.Graph, unread: frozenset[int], wishes: SkippableRows) -> None:
        self._graph, self._unread, self._wishes = graph, unread, wishes
        self._found = RowAnalysis()
        self._reads: dict[fx.Node, list[ReadRows]] = defaultdict(list)
        self._mutated = mutated_nodes(graph)
        self._input_only = {node for node in input_only_nodes(graph) if not has_gradient(node)}
        self._covered_reads: set[tuple[fx.Node, fx.Node]] = set()
        """Pairs of reader and value inside an attention, whose reads the attention has recorded."""

    def run(self) -> RowAnalysis:
        for position, item in enumerate(returned(self._graph)):
            if isinstance(item, fx.Node) and position not in self._unread:
                self._reads[item].append(AllRows(RESULT))
        for node in reversed(self._graph.nodes):
            if node.op == "output":
                continue
            if node.op == "call_function" and has_side_effects(node):
                self._reads[node].append(AllRows(op_name(node)))
            if self._reads[node]:
                self._visit(node)
        return self._found

    def _visit(self, node: fx.Node) -> None:
        whole = AllRows("a tensor that is changed in place")
        rows = whole if node in self._mutated else union(self._reads[node], _shape(node))
        self._found.of[node] = rows
        if node.op != "call_function":
            return
        if isinstance(rows, SomeRows):
            self._visit_some_rows(node, rows)
        else:
            self._visit_all_rows(node, rows)

    def _visit_some_rows(self, node: fx.Node, rows: SomeRows) -> None:
        if is_getitem(node):
            self._reads[tensor_input(node)].append(rows)
            return
        attention = match_fused_attention(node) or match_unfused_attention(node)
        if attention and (queries := attention.query_rows(rows)):
            self._visit_attention(attention, queries)
            return
        sliced = match_slice(node, rows) if self._wishes.upstream or self._wishes.labels else None
        if isinstance(sliced, SomeRows):
            self._reads[tensor_input(node)].append(sliced)
            return
        step = match_moe(node, rows.dims, propagate) or propagate(node, rows.dims)
        if step is None:
            self._found.of[node] = stop = AllRows(f"{op_name(node)}{source_line(node)}")
            self._visit_all_rows(node, stop)
            return
        self._found.propagations[node] = step
        for operand in {**dict.fromkeys(node.all_input_nodes), **step.row_dims, **dict.fromkeys(step.read_in_full)}:
            if operand not in step.unread:
                dims = step.row_dims.get(operand)
                self._reads[operand].append(SomeRows(dims, rows.atoms) if dims else AllRows(op_name(node)))

    def _visit_attention(self, attention: Attention, queries: SomeRows) -> None:
        self._found.of[attention.node] = queries
        self._found.attentions[attention.node] = attention
        for operand, rows in attention.operand_rows(queries):
            may_skip = self._wishes.padding or not has_attended_keys(rows.atoms)
            self._reads[operand].append(rows if may_skip else AllRows("attention, as density.padding is off"))
        if attention.operands:
            self._covered_reads |= {(item.reader, item.node) for item in attention.operands}
            self._reads[tensor_input(attention.node)].append(AllRows("attention"))
        if attention.mask is not None:
            self._reads[attention.mask].append(AllRows("the mask of attention"))

    def _visit_all_rows(self, node: fx.Node, rows: AllRows) -> None:
        loss = match_loss(node) if self._wishes.labels else None
        if loss:
            self._found.losses[node] = loss
            self._reads[loss.scores].append(loss.score_rows)
        selected = self._match_selected_tokens(node)
        for operand in node.all_input_nodes:
            if (node, operand) in self._covered_reads:
                continue
            if selected and operand is selected[0]:
                self._reads[operand].append(selected[1])
            elif loss is None or operand is not loss.scores:
                keeps_reader = rows.reader != RESULT and not _reduces_tokens(node, operand)
                reader = rows.reader if keeps_reader else f"{op_name(node)}{source_line(node)}"
                self._reads[operand].append(AllRows(reader))

    def _match_selected_tokens(self, node: fx.Node) -> tuple[fx.Node, SomeRows] | None:
        """Returns an input of which some tokens are read, although all of the result is."""
        if node in self._mutated:
            return None
        selection = match_selection(node, self._input_only) if self._wishes.upstream else None
        return selection or (match_masked_tokens(node, self._input_only) if self._wishes.padding else None)


def propagate(node: fx.Node, dims: Dims) -> Propagation | None:
    """Returns how a node computes these rows; None if it mixes rows or has no rule."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    rule = RULES.get(target.overloadpacket)
    if rule is None and torch.Tag.pointwise in target.tags:
        rule = arithmetic_rules.elementwise
    return rule(node, dims) if rule else None


def _reduces_tokens(node: fx.Node, operand: fx.Node) -> bool:
    """True if a node computes a value without tokens from one with tokens."""
    before, after = _shape(operand), _shape(node)
    return len(after) < 3 <= len(before) and before[:2] != after[:2] and not is_view(node)


def _shape(node: fx.Node) -> tuple[SizeExpression, ...]:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) and not (isinstance(value, tuple | list) and value):
        return ()
    return tuple(expression(size) for size in value_of(node).shape)


def has_side_effects(node: fx.Node) -> bool:
    """True if a node has an effect beyond its result, other than drawing random numbers."""
    if node.target in CHECKS:
        return True
    return not is_getitem(node) and writes(node) and getattr(node.target, "__module__", "") not in {"_operator", "math"}


def mutates_inputs(graph: fx.Graph) -> bool:
    """True if a graph mutates one of its inputs."""
    return any(node.op == "placeholder" for node in mutated_nodes(graph))


def source_line(node: fx.Node) -> str:
    """Returns the user's line that made a node, in parentheses."""
    line = user_line(node)
    return f" ({line})" if line else ""
