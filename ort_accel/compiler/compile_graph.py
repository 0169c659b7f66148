"""The whole way of one graph: decide, cut, build each segment, and string them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from torch import fx

from ort_accel.autotune.cost_model import Estimator
from ort_accel.autotune.time_attention import Attention
from ort_accel.autotune.time_matmuls import Products
from ort_accel.autotune.tuner import Tuner
from ort_accel.executor.matmul_segment import TwoWays
from ort_accel.executor.ort_segment import Fallback, OrtSegment, Results, Twin, build, lie_in_pool, ort_makes_results
from ort_accel.executor.program import SIZE, Program, Step, mark_last_uses
from ort_accel.executor.reuse_operands import is_own
from ort_accel.executor.torch_segment import PyTorchSegment
from ort_accel.graph.nodes import count_ops, is_part, is_size, is_view, op_name, returned, tensors_of, user_line
from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource, expression
from ort_accel.operators.flops import flops
from ort_accel.partition.assign import Assigner, Assignment, Refusal, short
from ort_accel.partition.placement import Decision, by_rule, place, segments
from ort_accel.partition.segments import Body, Cut, body_of
from ort_accel.partition.split_at_gradients import Gradients, due
from ort_accel.passes.fuse import fuse
from ort_accel.passes.hoist_weight_casts import CopiesOfWeights, WeightCast, take_out
from ort_accel.passes.remove_double_transpose import without_detours
from ort_accel.reporting import Reason, Report, Runner, Segment
from ort_accel.runtime.crash_journal import EndedBefore
from ort_accel.runtime.gradient_release import Leaves
from ort_accel.runtime.sessions import Sessions
from ort_accel.runtime.weight_copies import WeightCopies

LEFT = "left"
"""Marks the registers of what is left of gradients: what could not be handed over."""


@dataclass
class Lowering:
    """What lowering needs to know, the same for all graphs of a model."""

    sessions: Sessions
    opset: int
    report: Report
    unwanted: frozenset[str] = frozenset()
    failed: Callable[[Exception], bool] = lambda _: True
    """Told of a segment that failed at run time where PyTorch did not; says whether to try it again."""
    changed: Callable[[], None] = lambda: None
    """Told when another library takes work over, so that what the first one held can go."""
    before_segments: Callable[[], None] = lambda: None
    """Called before each segment runs."""
    for_speed: bool = True
    """Let PyTorch run what it runs faster. Without it, ONNX Runtime runs all that it can."""
    fusions: bool = True
    """Join operators that ONNX Runtime does not join by itself."""
    tuner: Tuner | None = None
    """Chooses by measurement between what ONNX Runtime and PyTorch both can run."""
    estimator: Estimator | None = None
    """Chooses by yardsticks where there is no tuner."""
    products: Products | None = None
    """Knows which products of PyTorch's oneDNN runs faster."""
    attention: Attention | None = None
    """Knows which attentions of PyTorch's run faster as products."""
    copies: WeightCopies | None = None
    """Keeps autocast's copies of weights."""
    leaves: Leaves | None = None
    """Gives parameters their gradients before the backward ends."""
    pool_from: float = 0
    """From so many bytes on, a result lies in memory of ONNX Runtime's pool. Smaller ones that leave a segment lie in
    PyTorch's, where others can come after them."""
    assigner: Assigner = field(init=False)

    def __post_init__(self) -> None:
        self.assigner = Assigner(self.opset, self.sessions, self.unwanted, self.for_speed)
        if self.estimator is not None:
            self.assigner.estimated = self.estimator.estimates

    def change(self, **fields: Any) -> None:
        """Take other values for some fields, for the graphs that are still to come."""
        vars(self).update(vars(replace(self, **fields)))


def lower_graph(
    module: fx.GraphModule,
    lowering: Lowering,
    name: str,
    bound: Callable[[fx.Node], bool] = lambda _: False,
    gradients: Gradients = (),
) -> Program:
    """Turn a functional ATen graph into a program.

    `bound` tells inputs that usually stay at their place, `gradients` what a backward's outputs are the gradients of.
    """
    _simplify(module.graph, lowering, lowering.report)
    casts = take_out(module.graph, bound) if lowering.copies and name.startswith("forward") else []
    decisions = _decisions(lowering)
    if lowering.tuner is not None:
        decisions.append(partial(_tuned, module, lowering, lowering.tuner, name, bound))
    with lowering.report.timed("assign operators", name):
        assignment = place(module.graph, decisions)
    assignment, cuts = segments(module.graph, assignment, lowering.for_speed, gradients)
    with lowering.report.timed("build sessions", name):
        assembly = _Assembly(module, lowering, name, bound, assignment, cuts)
        program = assembly.program(casts, gradients)
    lowering.report.segments += assembly.records
    _record(assignment, lowering.report)
    return program


def _simplify(graph: fx.Graph, lowering: Lowering, report: Report) -> None:
    without_detours(graph)
    if lowering.fusions:
        fuse(graph, report)


def _decisions(lowering: Lowering) -> list[Decision]:
    by_estimate = [] if lowering.estimator is None else [lowering.estimator.decide]
    return [by_rule(lowering.assigner.refusal), *by_estimate]


def _tuned(
    module: fx.GraphModule,
    lowering: Lowering,
    tuner: Tuner,
    name: str,
    bound: Callable[[fx.Node], bool],
    assignment: Assignment,
) -> Mapping[fx.Node, Refusal]:
    with lowering.report.timed("tune", name):
        trial = replace(lowering, sessions=lowering.sessions.without_trace(), failed=_fail)
        return tuner.decide(module, name, partial(_trial, module, trial, name, bound), assignment)


def foreseen(module: fx.GraphModule, gradients: Gradients, lowering: Lowering) -> list[Cut]:
    """The segments that a graph would be cut into, without measuring anything. The graph is rewritten on the way."""
    _simplify(module.graph, lowering, Report())
    assignment = place(module.graph, _decisions(lowering))
    return segments(module.graph, assignment, lowering.for_speed, gradients)[1]


def _trial(
    module: fx.GraphModule, lowering: Lowering, name: str, bound: Callable[[fx.Node], bool], assignment: Assignment
) -> Program:
    """A program to be timed, which leaves no trace in the report, the cache or the folder of models."""
    return _Assembly(module, lowering, name, bound, *segments(module.graph, assignment, lowering.for_speed)).program()


def _fail(error: Exception) -> bool:
    raise error


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, EndedBefore):
        return Refusal(Reason.ENDED_RUNS, str(error))
    return Refusal(Reason.FAILED, f"when it was compiled: {short(error)}")


def _record(assignment: Assignment, report: Report) -> None:
    for refused, refusal in assignment.refusals.items():
        report.fallback(op_name(refused), refusal.reason, refusal.detail, where=user_line(refused))


class _Assembly:
    """Numbers the values that pass between segments, and builds each segment."""

    def __init__(
        self,
        module: fx.GraphModule,
        lowering: Lowering,
        name: str,
        bound: Callable[[fx.Node], bool],
        assignment: Assignment,
        cuts: list[Cut],
    ) -> None:
        self._module, self._lowering, self._name, self._bound = module, lowering, name, bound
        self._assignment, self._free, self._cuts = assignment, assignment.free, cuts
        self.records = [Segment(name, c.runner, count_ops(c.nodes), sum(map(flops, c.nodes))) for c in cuts]
        self._register: dict[Any, int] = {}
        self._place = {node: position for position, node in enumerate(module.graph.nodes)}

    def program(self, casts: Sequence[WeightCast] = (), gradients: Gradients = ()) -> Program:
        """What runs the graph; the copies of weights are made first, and gradients leave when they can."""
        placeholders = self._module.graph.find_nodes(op="placeholder")
        symbols = SymbolSource()
        for position, node in enumerate(placeholders):
            self._register[node] = position
            symbols.learn(position, node.meta.get("val"))
        results = returned(self._module.graph)
        self._views = self._returned_views(results)
        steps = [self._step(index, item) for index, item in enumerate(self._cuts)]
        if gradients and (leaves := self._lowering.leaves) is not None:
            steps = self._with_exits(steps, results, gradients, leaves)
        if casts and (copies := self._lowering.copies) is not None:
            steps.insert(0, self._copying_step(casts, copies))
        steps += self._view_step(self._views)
        outputs = [self._register.get((LEFT, at), self._output(item)) for at, item in enumerate(results)]
        mark_last_uses(steps, {index for index in outputs if index is not None})
        sizes = SizeFunction(expression(i.meta["val"] if isinstance(i, fx.Node) else i) for i in results if _sized(i))
        return Program(steps, len(self._register), symbols, outputs, sizes, self._lowering.before_segments)

    def _returned_views(self, results: Sequence[Any]) -> list[fx.Node]:
        """Views among the graph's outputs; PyTorch takes them at the end, at no cost."""
        nodes = [item for item in results if isinstance(item, fx.Node) and item.op != "placeholder"]
        return [node for node in dict.fromkeys(nodes) if node in self._free]

    def _view_step(self, views: Sequence[fx.Node]) -> list[Step]:
        new = [node for node in views if node not in self._register]
        return [self._pytorch_step(body_of([], new, self._free), new)] if new else []

    def _with_exits(
        self, steps: Sequence[Step], results: Sequence[Any], gradients: Gradients, leaves: Leaves
    ) -> list[Step]:
        """These steps, and between them those that hand gradients over and leave what has to be returned."""
        reads_and_writes = [(step.inputs, step.outputs) for step in steps]
        leaving = due(self._module.graph, gradients, self._free, reads_and_writes, self._register.__getitem__)
        tensors = sum(source is not None for source in gradients)
        all_steps: list[Step] = []
        for index, step in enumerate(steps):
            all_steps.append(step)
            if index not in leaving:
                continue
            positions = leaving[index]
            own = [results[position] for position in positions]
            all_steps += self._view_step(own)
            reads = [self._register[node] for node in own]
            for position in positions:
                self._register[LEFT, position] = len(self._register)
            edges = [source.edge for source in map(gradients.__getitem__, positions) if source is not None]
            run = partial(_hand_over, leaves, edges, tensors)
            all_steps.append(Step(run, reads, [self._register[LEFT, position] for position in positions]))
        return all_steps

    def _wanted(self, index: int, item: Cut) -> list[fx.Node]:
        """The values of this segment that a later segment or the caller needs."""
        later, own = self._behind(index), set(item.nodes)
        repeated = self._free - own
        values = [value for node in item.nodes for value in tensors_of(node)]
        return [value for value in dict.fromkeys(values) if _is_needed(value, later, repeated.__contains__)]

    def _spent(self, index: int, inputs: Sequence[fx.Node]) -> list[fx.Node]:
        """Of what this segment reads, that which nobody needs afterwards, not even as a view, and whose memory is the
        program's own. What ONNX Runtime gives may be a constant that all runs share; its products are none."""
        later, runner = self._behind(index), self._assignment.runner
        own = [node for node in inputs if node in runner and is_own(node, runner[node])]
        return [node for node in own if not _is_needed(node, later, lambda user: is_view(user) or is_part(user))]

    def _behind(self, index: int) -> set[fx.Node]:
        return {node for other in self._cuts[index + 1 :] for node in other.nodes}

    def _step(self, index: int, item: Cut) -> Step:
        wanted = self._wanted(index, item)
        body = body_of(item.nodes, wanted, self._free)
        if item.runner is Runner.ORT:
            try:
                return self._ort_step(index, body, wanted)
            except Exception as error:  # whatever it is that ONNX Runtime refuses here, PyTorch can run
                refusal = _refusal(error)
                item.runner = self.records[index].runner = Runner.PYTORCH
                self._assignment.refusals.update(dict.fromkeys(item.nodes, refusal))
        return self._pytorch_step(body, wanted, self._spent(index, body.inputs))

    def _ort_step(self, index: int, body: Body, wanted: list[fx.Node]) -> Step:
        model = build(body, wanted, self._lowering.opset)
        fallback = Fallback(Twin(body, wanted, self._module), self._lowering.failed)
        name = f"{self._name} part {index}"
        in_pool = lie_in_pool(wanted, self._lowering.pool_from)
        results = ort_makes_results if in_pool else Results(wanted, model.output_orders)
        lowering, record = self._lowering, self.records[index]
        segment = OrtSegment(model, lowering.sessions, self._bound, fallback, name, results, record)
        other = self._by_onednn(index, body, wanted)
        run = segment if other is None else TwoWays(segment, other, body.nodes, lowering.changed, record)
        return self._numbered(run, segment.inputs, wanted)

    def _by_onednn(self, index: int, body: Body, wanted: list[fx.Node]) -> PyTorchSegment | None:
        """The same for sizes that came before; None where that would not be faster."""
        lowering = self._lowering
        products = lowering.products.for_known_sizes(body.nodes) if lowering.products and lowering.estimator else {}
        computed = [node for node in body.nodes if node not in self._free and not is_part(node)]
        if not products or not lowering.estimator or not lowering.estimator.onednn_pays(computed):
            return None
        lowering.report.counters["products that oneDNN takes over where sizes come again"] += len(products)
        return self._pytorch_segment(body, wanted, self._spent(index, body.inputs), products)

    def _pytorch_step(self, body: Body, wanted: list[fx.Node], spent: Sequence[fx.Node] = ()) -> Step:
        known = self._lowering.products, self._lowering.attention
        better = {node: call for one in known if one for node, call in one.replacements(body.nodes).items()}
        segment = self._pytorch_segment(body, wanted, spent, better)
        return self._numbered(segment, segment.inputs, wanted)

    def _pytorch_segment(
        self, body: Body, wanted: list[fx.Node], spent: Sequence[fx.Node], better: Mapping[fx.Node, Any]
    ) -> PyTorchSegment:
        return PyTorchSegment(body, wanted, self._module, self._lowering.pool_from < inf, spent, better)

    def _copying_step(self, casts: Sequence[WeightCast], copies: WeightCopies) -> Step:
        reads = [self._register[cast.weight] for cast in casts]
        return Step(CopiesOfWeights(casts, copies), reads, [self._register[cast.copy] for cast in casts])

    def _numbered(self, run: Any, inputs: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> Step:
        reads = [self._register[node] for node in inputs]
        for node in wanted:
            self._register.setdefault(node, len(self._register))
        return Step(run, reads, [self._register[node] for node in wanted])

    def _output(self, item: Any) -> int | None:
        if item is None:
            return None
        return SIZE if _sized(item) else self._register[item]


def _is_needed(value: fx.Node, later: set[fx.Node], looks_through: Callable[[fx.Node], bool]) -> bool:
    """Whether one of those nodes, or the caller, reads a value, or what such users show of it."""
    pending = list(value.users)
    while pending:
        user = pending.pop()
        if user in later or user.op == "output":
            return True
        if looks_through(user):
            pending.extend(user.users)
    return False


def _hand_over(
    leaves: Leaves, edges: Sequence[int], tensors: int, gradients: list[Any], _: dict[str, int]
) -> Sequence[Any]:
    return leaves.hand_over(gradients, edges, tensors)


def _sized(item: Any) -> bool:
    return isinstance(item, int) or (isinstance(item, fx.Node) and is_size(item))
