"""The way from a forward graph to a smaller one: what is read, which rows that needs, and how to write it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ort_accel.graph.nodes import is_random, is_view, returned
from ort_accel.graph.requires_grad import has_gradient, mark_gradients
from ort_accel.operators.flops import flops
from ort_accel.row_skipping.batch_row_tables import Batch, Front
from ort_accel.row_skipping.mutation import write_less
from ort_accel.row_skipping.packed_graph_writer import Packing
from ort_accel.row_skipping.row_demand import Demands, Wishes, find_demands, writes_into_inputs
from ort_accel.row_skipping.row_plan import Plan, RowSet, has_labels, make_plan
from ort_accel.row_skipping.row_sets import Everything, Marked, has_keys


class NothingToSkip(Exception):
    """Why a graph is left as it is."""


@dataclass(frozen=True)
class Proposal:
    """A smaller graph that can be written, and what it leaves out."""

    traced: fx.GraphModule
    front: Front
    unread: frozenset[int]
    """Positions of the outputs that it does not make."""
    work: float
    """Floating point operations of the whole graph."""
    work_of: dict[int, float]
    """Those that belong to each set of rows, by its number."""

    @property
    def plan(self) -> Plan:
        """Which values are computed for which rows."""
        return self.front.plan

    @property
    def why_whole(self) -> str:
        """What reads the rows that are not left out."""
        return _why_not(self.traced.graph, self.plan.demands)

    def needed(self, batch: Batch) -> float:
        """Floating point operations that a batch needs."""
        if not batch.fits:
            return self.work
        densities = zip(self.plan.sets, batch.densities, strict=True)
        return self.work - sum(
            self.work_of.get(rows.number, 0.0) * (1 - count / max(whole, 1)) for rows, (count, whole) in densities
        )

    def write(self, arguments: Sequence[Any]) -> Any:
        """What the smaller graph computes from the inputs, followed by the tables of a batch."""
        inputs = len(self.traced.graph.find_nodes(op="placeholder"))
        packing = Packing(self.traced, self.front, set(self.unread))
        return packing.write(arguments[:inputs], arguments[inputs:])


def unread_outputs(traced: fx.GraphModule, inputs: Sequence[Any], beside_sums: bool) -> frozenset[int]:
    """What a training step gives for each token beside its loss, as positions among the outputs of its graph; and
    where there is no loss, if `beside_sums`, what it gives beside sums of them, such as the embedding of a sentence.

    None where the graph changes its inputs: if one of these is read after all, the graph runs once more. And none that
    random numbers are drawn for, since later draws would be others.
    """
    if writes_into_inputs(traced.graph):
        return frozenset()
    mark_gradients(traced.graph, inputs)
    return _per_token(traced.graph, beside_sums)


def propose(traced: fx.GraphModule, inputs: Sequence[Any], wishes: Wishes, unread: frozenset[int]) -> Proposal:
    """A smaller graph for this one, without its unread outputs; `NothingToSkip` says why there is none."""
    if writes_into_inputs(traced.graph):
        raise NothingToSkip("the graph changes one of its inputs in place")
    write_less(traced.graph)
    mark_gradients(traced.graph, inputs)
    demands = find_demands(traced.graph, set(unread), wishes)
    plan = make_plan(demands)
    work_of = _work(plan)
    if not sum(work_of.values()):
        raise NothingToSkip(_why_not(traced.graph, demands))
    front = Front(plan, traced)
    if not front.is_possible:
        raise NothingToSkip("the labels are computed from what the model computes")
    return Proposal(traced, front, unread, sum(map(flops, traced.graph.nodes)), work_of)


def _work(plan: Plan) -> dict[int, float]:
    work: dict[int, float] = defaultdict(float)
    for node, rows in plan.set_of.items():
        attention = plan.demands.attentions.get(node)
        if node.op == "call_function" and (attention is None or attention.can_run_by_sequence):
            how = plan.demands.passages.get(node)
            work[rows.number] += sum(map(flops, (node, *(how.within if how else ()))))
    return dict(work)


def _per_token(graph: fx.Graph, beside_sums: bool) -> frozenset[int]:
    """Outputs with a place for each token that are not needed for those to be differentiated."""
    outputs = dict(enumerate(returned(graph)))
    found = {at: item for at, item in outputs.items() if _rank(item) > 2 and not _shows_an_input(item)}
    if not any(_rank(item) == 0 and has_gradient(item) for item in outputs.values()):
        sums = [item for item in outputs.values() if _rank(item) in (1, 2) and has_gradient(item)]
        summed = _behind(sums) if beside_sums else set()
        found = {at: item for at, item in found.items() if item in summed}
    needed = _behind(item for at, item in outputs.items() if at not in found)
    return frozenset(at for at, item in found.items() if not any(map(is_random, _behind([item]) - needed)))


def _behind(values: Iterable[Any]) -> set[fx.Node]:
    """Everything that these values are computed from, and they themselves."""
    pending = [value for value in values if isinstance(value, fx.Node)]
    found: set[fx.Node] = set()
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _rank(item: Any) -> int:
    """The number of dimensions of a floating-point output; -1 for any other."""
    value = item.meta.get("val") if isinstance(item, fx.Node) else None
    return value.ndim if isinstance(value, Tensor) and value.is_floating_point() else -1


def _shows_an_input(node: fx.Node) -> bool:
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node.op != "call_function"


def _why_not(graph: fx.Graph, demands: Demands) -> str:
    """What reads the rows that could have been left out: the reader behind most of the work."""
    work: dict[str, float] = defaultdict(float)
    for node in graph.nodes:
        demand = demands.of.get(node)
        if node.op == "call_function" and isinstance(demand, Everything):
            work[demand.reader] += flops(node)
    worked = {reader: amount for reader, amount in work.items() if amount}
    if not worked:
        return "no matrix product is large enough to matter"
    return f"every row is read, by {max(worked, key=worked.__getitem__)}"


def kinds_of(plan: Plan) -> dict[str, list[RowSet]]:
    """The sets of rows by the feature that leaves rows out of them."""
    kinds: dict[str, list[RowSet]] = {"density.labels": [], "density.padding": [], "compute.upstream": []}
    for rows in plan.sets:
        if rows.is_core or has_keys(rows.atoms) or any(isinstance(atom, Marked) for atom in rows.atoms):
            kinds["density.padding"].append(rows)
        elif any(map(has_labels, rows.atoms)):
            kinds["density.labels"].append(rows)
        else:
            kinds["compute.upstream"].append(rows)
    return kinds
