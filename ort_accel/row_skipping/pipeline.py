"""Analyses a forward graph, and proposes a smaller graph that computes only the rows that are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx.node import Argument

from ort_accel.graph.nodes import is_random, returned
from ort_accel.graph.requires_grad import has_gradient, mark_gradients
from ort_accel.operators.flops import flops
from ort_accel.row_skipping.batch_row_tables import BatchTables, RowTableBuilder
from ort_accel.row_skipping.input_graph import is_view_of_input
from ort_accel.row_skipping.mutation import functionalize
from ort_accel.row_skipping.packed_graph_writer import PackedGraphWriter
from ort_accel.row_skipping.row_demand import RowAnalysis, SkippableRows, analyse_rows, mutates_inputs
from ort_accel.row_skipping.row_plan import RowPlan, RowSet, make_plan
from ort_accel.row_skipping.row_sets import AllRows, Unmasked, ValidLabel, has_attended_keys, innermost


class NothingToSkip(Exception):
    """Raised where no row can be left out; the message says why."""


@dataclass(frozen=True)
class Proposal:
    """A smaller graph that can be written, and the work that it saves."""

    traced: fx.GraphModule
    front: RowTableBuilder
    unread: frozenset[int]
    """Positions of the outputs that it does not compute."""
    work: float
    """Floating point operations of the whole graph."""
    work_of: dict[int, float]
    """Floating point operations of each row set, by its number."""
    work_of_runs: list[float]
    """Floating point operations of each varlen attention of the tables, of all layers that share it."""

    @property
    def plan(self) -> RowPlan:
        """The values that are computed for each set of rows."""
        return self.front.plan

    @property
    def why_whole(self) -> str:
        """The reason why rows are computed: the operator that reads them."""
        return _why_all_rows(self.traced.graph, self.plan.demands)

    def needed(self, batch: BatchTables) -> float:
        """Returns the floating point operations that a batch needs."""
        if not batch.fits:
            return self.work
        works = [*(self.work_of.get(rows.number, 0.0) for rows in self.plan.sets), *self.work_of_runs]
        counts = [*batch.densities, *batch.pairs]
        return self.work - sum(
            work * (1 - count / max(whole, 1)) for work, (count, whole) in zip(works, counts, strict=True)
        )

    def write(self, arguments: Sequence[Any]) -> list[Any]:
        """Runs the smaller graph on its inputs, followed by the tables of a batch; a tracer records the graph."""
        inputs = len(self.traced.graph.find_nodes(op="placeholder"))
        writer = PackedGraphWriter(self.traced, self.front, self.unread)
        return writer.write(arguments[:inputs], arguments[inputs:])


def unread_outputs(traced: fx.GraphModule, inputs: Sequence[Any], beside_sums: bool) -> frozenset[int]:
    """Returns the positions of outputs per token that a training step rarely reads: the logits beside a loss, say.

    Without a loss, and with `beside_sums`, these are outputs that a returned embedding of a sentence sums up. Reading
    one runs the graph again. So a graph that mutates its inputs has none, and none depends on further random numbers.
    """
    if mutates_inputs(traced.graph):
        return frozenset()
    mark_gradients(traced.graph, inputs)
    return _per_token(traced.graph, beside_sums)


def propose(traced: fx.GraphModule, inputs: Sequence[Any], wishes: SkippableRows, unread: frozenset[int]) -> Proposal:
    """Returns a smaller graph without the unread outputs; raises `NothingToSkip` where there is none."""
    if mutates_inputs(traced.graph):
        raise NothingToSkip("the graph changes one of its inputs in place")
    functionalize(traced.graph)
    mark_gradients(traced.graph, inputs)
    demands = analyse_rows(traced.graph, unread, wishes)
    plan = make_plan(demands)
    work_of = _work(plan)
    if not sum(work_of.values()) and not plan.runs:
        raise NothingToSkip(_why_all_rows(traced.graph, demands))
    front = RowTableBuilder(plan, traced)
    if not front.is_possible:
        raise NothingToSkip("the labels are computed from what the model computes")
    work_of_runs = [0.0] * len(front.runs)
    for attention, *_ in plan.runs:
        work_of_runs[front.run_of(attention)] += flops(attention.node)
    return Proposal(traced, front, unread, sum(map(flops, traced.graph.nodes)), work_of, work_of_runs)


def _work(plan: RowPlan) -> dict[int, float]:
    work: dict[int, float] = defaultdict(float)
    for node, rows in plan.set_of.items():
        if node.op == "call_function" and node not in plan.demands.attentions:
            step = plan.demands.propagations.get(node)
            work[rows.number] += sum(map(flops, (node, *(step.inner_nodes if step else ()))))
    return dict(work)


def _per_token(graph: fx.Graph, beside_sums: bool) -> frozenset[int]:
    """Returns outputs with a row for each token that neither the loss nor the sums are computed from."""
    outputs = dict(enumerate(returned(graph)))
    found = {at: item for at, item in outputs.items() if _rank(item) > 2 and not is_view_of_input(item)}
    if not any(_rank(item) == 0 and has_gradient(item) for item in outputs.values()):
        sums = [item for item in outputs.values() if _rank(item) in (1, 2) and has_gradient(item)]
        summed = _ancestors(sums) if beside_sums else set()
        found = {at: item for at, item in found.items() if item in summed}
    needed = _ancestors(item for at, item in outputs.items() if at not in found)
    return frozenset(at for at, item in found.items() if not any(map(is_random, _ancestors([item]) - needed)))


def _ancestors(values: Iterable[Argument]) -> set[fx.Node]:
    """Returns these values and all nodes that they are computed from."""
    pending = [value for value in values if isinstance(value, fx.Node)]
    found: set[fx.Node] = set()
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _rank(item: Argument) -> int:
    """Returns the number of dimensions of a floating-point output; -1 for any other."""
    value = item.meta.get("val") if isinstance(item, fx.Node) else None
    return value.ndim if isinstance(value, Tensor) and value.is_floating_point() else -1


def _why_all_rows(graph: fx.Graph, demands: RowAnalysis) -> str:
    """Returns the reader of all rows that causes most of the work."""
    work: dict[str, float] = defaultdict(float)
    for node in graph.nodes:
        rows = demands.of.get(node)
        if node.op == "call_function" and isinstance(rows, AllRows):
            work[rows.reader] += flops(node)
    if not any(work.values()):
        return "no matrix product is large enough to matter"
    return f"every row is read, by {max(work, key=work.__getitem__)}"


def row_sets_by_feature(plan: RowPlan) -> dict[str, list[RowSet]]:
    """Returns the row sets by the feature that makes them small."""
    kinds: dict[str, list[RowSet]] = {"density.labels": [], "density.padding": [], "compute.upstream": []}
    for rows in plan.sets:
        if rows.is_attended or has_attended_keys(rows.atoms) or any(isinstance(atom, Unmasked) for atom in rows.atoms):
            kinds["density.padding"].append(rows)
        elif any(isinstance(innermost(atom), ValidLabel) for atom in rows.atoms):
            kinds["density.labels"].append(rows)
        else:
            kinds["compute.upstream"].append(rows)
    return kinds
