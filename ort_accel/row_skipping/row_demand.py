"""What is read of every value of a forward graph, found from its outputs backward."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ort_accel.graph.nodes import CHECKS, is_part, is_view, op_name, returned, user_line, writes
from ort_accel.graph.requires_grad import has_gradient
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.row_skipping.attention_padding import Attention, attention_in
from ort_accel.row_skipping.ignored_labels import Loss, loss_in
from ort_accel.row_skipping.input_roles import known_in_front
from ort_accel.row_skipping.masked_pooling import masked
from ort_accel.row_skipping.moe import experts
from ort_accel.row_skipping.mutation import written
from ort_accel.row_skipping.operator_rules import passage
from ort_accel.row_skipping.row_flow import Passage, value_of
from ort_accel.row_skipping.row_sets import Demand, Everything, Some, has_keys, join
from ort_accel.row_skipping.selections import chosen, sliced
from ort_accel.row_skipping.unfused_attention import written_out

RESULT = "the model's result"
"""What reads an output of the graph."""


@dataclass(frozen=True)
class Wishes:
    """Which reasons for leaving rows out count."""

    labels: bool = True
    padding: bool = True
    upstream: bool = True


@dataclass
class Demands:
    """What is read of each value; a node that is not in `of` is not read at all."""

    of: dict[fx.Node, Demand] = field(default_factory=dict)
    passages: dict[fx.Node, Passage] = field(default_factory=dict)
    losses: dict[fx.Node, Loss] = field(default_factory=dict)
    attentions: dict[fx.Node, Attention] = field(default_factory=dict)
    """Those of which only some queries are needed."""

    def rows(self, node: fx.Node) -> Some | None:
        """The rows of a value, where not all are read."""
        found = self.of.get(node)
        return found if isinstance(found, Some) else None


def find_demands(graph: fx.Graph, unread: set[int], wishes: Wishes) -> Demands:
    """Go through a graph backward. `unread` are positions of outputs that nobody reads."""
    return _Search(graph, unread, wishes).run()


class _Search:
    def __init__(self, graph: fx.Graph, unread: set[int], wishes: Wishes) -> None:
        self._graph, self._unread, self._wishes = graph, unread, wishes
        self._found = Demands()
        self._read: dict[fx.Node, list[Demand]] = defaultdict(list)
        self._frozen = written(graph)
        self._known = {node for node in known_in_front(graph) if not has_gradient(node)}
        self._said: set[tuple[fx.Node, fx.Node]] = set()
        """Readers of values of which was said where attention ends what is read."""

    def run(self) -> Demands:
        for position, item in enumerate(returned(self._graph)):
            if isinstance(item, fx.Node) and position not in self._unread:
                self._read[item].append(Everything(RESULT))
        for node in reversed(self._graph.nodes):
            if node.op == "output":
                continue
            if node.op == "call_function" and is_lasting(node):
                self._read[node].append(Everything(op_name(node)))
            if self._read[node]:
                self._visit(node)
        return self._found

    def _visit(self, node: fx.Node) -> None:
        whole = Everything("a tensor that is changed in place")
        demand = whole if node in self._frozen else join(self._read[node], _shape(node))
        self._found.of[node] = demand
        if node.op != "call_function":
            return
        if isinstance(demand, Some):
            self._some(node, demand)
        else:
            self._everything(node, demand)

    def _some(self, node: fx.Node, demand: Some) -> None:
        if is_part(node):
            self._read[node.args[0]].append(demand)
            return
        attention = attention_in(node) or written_out(node)
        if attention and attention.demand(demand):
            self._attend(attention, demand)
            return
        step = sliced(node, demand) if self._wishes.upstream or self._wishes.labels else None
        if step and isinstance(step[1], Some):
            self._read[node.args[0]].append(step[1])
            return
        how = experts(node, demand.dims, passage) or passage(node, demand.dims)
        if how is None:
            self._found.of[node] = stop = Everything(f"{op_name(node)}{place_of(node)}")
            self._everything(node, stop)
            return
        self._found.passages[node] = how
        for given in {**dict.fromkeys(node.all_input_nodes), **how.needs, **dict.fromkeys(how.reads)}:
            if given in how.unread:
                continue
            needed = how.needs.get(given)
            self._read[given].append(Some(needed, demand.atoms) if needed else Everything(op_name(node)))

    def _attend(self, attention: Attention, demand: Demand) -> None:
        queries = attention.demand(demand)
        assert queries is not None
        self._found.of[attention.node] = queries
        self._found.attentions[attention.node] = attention
        for given, rows in attention.reads(queries):
            is_asked = self._wishes.padding or not has_keys(rows.atoms)
            self._read[given].append(rows if is_asked else Everything("attention, as density.padding is off"))
        if attention.operands:
            self._said |= {(item.reader, item.node) for item in attention.operands}
            inner: Any = attention.node.args[0]
            self._read[inner].append(Everything("attention"))
        if attention.mask is not None:
            self._read[attention.mask].append(Everything("the mask of attention"))

    def _everything(self, node: fx.Node, demand: Demand) -> None:
        assert isinstance(demand, Everything)
        loss = loss_in(node) if self._wishes.labels else None
        if loss:
            self._found.losses[node] = loss
            self._read[loss.scores].append(loss.demand)
        part = self._part(node)
        for given in node.all_input_nodes:
            if (node, given) in self._said:
                continue
            if part and given is part[0]:
                self._read[given].append(part[1])
            elif loss is None or given is not loss.scores:
                known = demand.reader != RESULT and not _brings_tokens_together(node, given)
                self._read[given].append(Everything(demand.reader if known else f"{op_name(node)}{place_of(node)}"))

    def _part(self, node: fx.Node) -> tuple[fx.Node, Some] | None:
        """An input of which only some tokens are read, though all of the result is."""
        if node in self._frozen:
            return None
        choice = chosen(node, self._known) if self._wishes.upstream else None
        return choice or (masked(node, self._known) if self._wishes.padding else None)


def _brings_tokens_together(node: fx.Node, given: fx.Node) -> bool:
    """Whether a node makes a value without tokens of one with tokens: then it is what reads them all."""
    before, after = _shape(given), _shape(node)
    return len(after) < 3 <= len(before) and before[:2] != after[:2] and not is_view(node)


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) and not (isinstance(value, tuple | list) and value):
        return ()
    return tuple(expression(size) for size in value_of(node).shape)


def is_lasting(node: fx.Node) -> bool:
    """Whether a node has an effect beyond its result, other than drawing random numbers."""
    if node.target in CHECKS:
        return True
    return not is_part(node) and writes(node) and getattr(node.target, "__module__", "") not in {"_operator", "math"}


def writes_into_inputs(graph: fx.Graph) -> bool:
    """Whether a graph changes one of its inputs."""
    return any(node.op == "placeholder" for node in written(graph))


def place_of(node: fx.Node) -> str:
    """The user's line that made a node, as the end of a sentence."""
    line = user_line(node)
    return f" ({line})" if line else ""
