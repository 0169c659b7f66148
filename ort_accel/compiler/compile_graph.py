"""Compiles an ATen graph into a program: runs the last passes, assigns operators, cuts and builds segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx
from torch.fx.node import Argument

from ort_accel.autotune.tuner import Tuner
from ort_accel.compiler.lowering import Lowering
from ort_accel.executor.build_model import build
from ort_accel.executor.ort_segment import (
    Fallback,
    OrtSegment,
    Twin,
)
from ort_accel.executor.program import SIZE, Program, Run, Step, mark_last_uses
from ort_accel.executor.reuse_operands import is_reusable
from ort_accel.executor.torch_segment import PyTorchSegment
from ort_accel.generated.replace import SegmentGraph
from ort_accel.graph.meta_keys import CAST_OF
from ort_accel.graph.nodes import count_ops, is_getitem, is_size, is_view, op_name, output_nodes_of, returned, user_line
from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource, expression
from ort_accel.lowering.aten_call import needs_copy
from ort_accel.operators.flops import GraphFlops, flops
from ort_accel.partition.assign import Assignment, Refusal, short_message
from ort_accel.partition.placement import Decision, by_rule, place, segments
from ort_accel.partition.segments import Body, Cut, body_of
from ort_accel.partition.split_at_gradients import Gradients, gradients_by_step
from ort_accel.passes.pipeline import Stage, run_passes
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report
from ort_accel.reporting.segments import Runner, Segment
from ort_accel.runtime.crash_journal import CrashedBefore
from ort_accel.runtime.gradient_release import GradientRelease
from ort_accel.runtime.weight_copies import WeightCopies

IsLasting = Callable[[fx.Node], bool]
"""Tells the graph inputs whose memory usually stays in place from step to step."""


def lower_graph(
    module: fx.GraphModule,
    lowering: Lowering,
    name: str,
    is_lasting: IsLasting = lambda _: False,
    gradients: Gradients = (),
) -> Program:
    """Compile a functional ATen graph; `gradients` tells what a backward's outputs are the gradients of."""
    options, work = lowering.passes, GraphFlops(module.graph)
    if lowering.copies and name.startswith("forward"):
        options = replace(options, is_cached_weight=is_lasting)
    run_passes(module.graph, Stage.SEGMENTS, options, lowering.report)
    decisions = _decisions(lowering)
    if lowering.tuner is not None:
        decisions.append(partial(_tuned, module, lowering, lowering.tuner, name, is_lasting))
    with lowering.report.timed("assign operators", name):
        assignment, cuts = _divided(module.graph, lowering, decisions, gradients)
    with lowering.report.timed("build sessions", name):
        builder = _ProgramBuilder(module, lowering, name, is_lasting, assignment, cuts)
        program = builder.program(gradients)
        program.flops = work
    lowering.report.segments += builder.records
    for node, refusal in assignment.refusals.items():
        lowering.report.fallback(
            op_name(node), refusal.reason, refusal.detail, where=user_line(node), is_called=assignment.is_called(node)
        )
    return program


def predict_segments(module: fx.GraphModule, gradients: Gradients, lowering: Lowering) -> list[Cut]:
    """Returns the segments that a graph would be cut into, without timing anything. The graph is rewritten."""
    run_passes(module.graph, Stage.SEGMENTS, lowering.passes, Report())
    assignment, cuts = _divided(module.graph, lowering, _decisions(lowering), gradients)
    copied = {node for node, kernel in assignment.called.items() if kernel is None and needs_copy(node)}
    return [
        replace(item, called=assignment.called.keys() & item.nodes, copied=copied.intersection(item.nodes))
        for item in cuts
    ]


def _divided(
    graph: fx.Graph, lowering: Lowering, decisions: Sequence[Decision], gradients: Gradients
) -> tuple[Assignment, list[Cut]]:
    """Returns who runs each node, and the segments."""
    assignment = place(graph, decisions)
    if not lowering.calls_pytorch:
        return segments(graph, assignment, lowering.for_speed, gradients)
    leaving = () if lowering.leaves is None else gradients
    return segments(graph, assignment.with_calls(), False, leaving)


def _decisions(lowering: Lowering) -> list[Decision]:
    by_estimate = [] if lowering.estimator is None else [lowering.estimator.decide]
    return [by_rule(lowering.assigner.refusal), *by_estimate]


def _tuned(
    module: fx.GraphModule,
    lowering: Lowering,
    tuner: Tuner,
    name: str,
    is_lasting: IsLasting,
    assignment: Assignment,
) -> Mapping[fx.Node, Refusal]:
    with lowering.report.timed("tune", name):
        trial = replace(lowering, sessions=lowering.sessions.without_trace(), failed=_raise, generator=None)
        return tuner.decide(module, name, partial(_trial, module, trial, name, is_lasting), assignment)


def _trial(
    module: fx.GraphModule, lowering: Lowering, name: str, is_lasting: IsLasting, assignment: Assignment
) -> Program:
    """Returns a program to be timed, which leaves no trace in the report, the cache or the folder of models."""
    assignment, cuts = segments(module.graph, assignment, lowering.for_speed)
    return _ProgramBuilder(module, lowering, name, is_lasting, assignment, cuts).program()


def _raise(error: Exception) -> bool:
    raise error


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, CrashedBefore):
        return Refusal(Reason.ENDED_RUNS, str(error))
    return Refusal(Reason.FAILED, f"when it was compiled: {short_message(error)}")


class _ProgramBuilder:
    """Numbers the registers of values that pass between segments, and builds each segment."""

    def __init__(
        self,
        module: fx.GraphModule,
        lowering: Lowering,
        name: str,
        is_lasting: IsLasting,
        assignment: Assignment,
        cuts: list[Cut],
    ) -> None:
        self._module, self._lowering, self._name, self._is_lasting = module, lowering, name, is_lasting
        self._assignment, self._free, self._cuts = assignment, assignment.free, cuts
        self.records = [self._record(item) for item in cuts]
        self._registers: dict[fx.Node, int] = {}
        self._not_handed_over: dict[int, int] = {}
        """By the position of a gradient among the outputs, the register of what its parameter did not take."""

    def _record(self, item: Cut) -> Segment:
        calls = [(node, self._assignment.called[node]) for node in item.nodes if node in self._assignment.called]
        called = [node for node, kernel in calls if kernel is None]
        own = [node for node, kernel in calls if kernel is not None]
        amounts = (amount for part in (called, own) for amount in (len(part), sum(map(flops, part))))
        return Segment(self._name, item.runner, count_ops(item.nodes), sum(map(flops, item.nodes)), *amounts)

    def program(self, gradients: Gradients = ()) -> Program:
        """Returns the program: it casts weights first, and hands gradients over as soon as nothing reads them."""
        placeholders = self._module.graph.find_nodes(op="placeholder")
        symbols = SymbolSource()
        for position, node in enumerate(placeholders):
            self._registers[node] = position
            symbols.learn(position, node.meta.get("val"))
        results = returned(self._module.graph)
        steps = [self._step(index, item) for index, item in enumerate(self._cuts)]
        if gradients and (leaves := self._lowering.leaves) is not None:
            steps = self._with_hand_overs(steps, results, gradients, leaves)
        steps = self._weight_cast_step(placeholders) + steps + self._view_step(self._returned_views(results))
        outputs = [
            self._not_handed_over[position] if position in self._not_handed_over else self._output(item)
            for position, item in enumerate(results)
        ]
        mark_last_uses(steps, {index for index in outputs if index is not None})
        sizes = SizeFunction(expression(i.meta["val"] if isinstance(i, fx.Node) else i) for i in results if _is_size(i))
        registers = len(self._registers) + len(self._not_handed_over)
        return Program(steps, registers, symbols, outputs, sizes, self._lowering.before_segments)

    def _returned_views(self, results: Sequence[Argument]) -> list[fx.Node]:
        """Returns the views among the graph's outputs, which PyTorch takes at the end at no cost."""
        nodes = [item for item in results if isinstance(item, fx.Node) and item.op != "placeholder"]
        return [node for node in dict.fromkeys(nodes) if node in self._free]

    def _view_step(self, views: Sequence[fx.Node]) -> list[Step]:
        new = [node for node in views if node not in self._registers]
        return [self._pytorch_step(body_of([], new, self._free), new)] if new else []

    def _with_hand_overs(
        self, steps: Sequence[Step], results: Sequence[Argument], gradients: Gradients, leaves: GradientRelease
    ) -> list[Step]:
        """Returns the steps, and between them steps that hand gradients over to their parameters."""
        reads_and_writes = [(step.inputs, step.outputs) for step in steps]
        leaving = gradients_by_step(
            self._module.graph, gradients, self._free, reads_and_writes, self._registers.__getitem__
        )
        tensors = sum(source is not None for source in gradients)
        all_steps: list[Step] = []
        for index, step in enumerate(steps):
            all_steps.append(step)
            if index not in leaving:
                continue
            positions = leaving[index]
            nodes = [item for item in map(results.__getitem__, positions) if isinstance(item, fx.Node)]
            all_steps += self._view_step(nodes)
            reads = [self._registers[node] for node in nodes]
            for position in positions:
                self._not_handed_over[position] = len(self._registers) + len(self._not_handed_over)
            edges = [source.edge for source in map(gradients.__getitem__, positions) if source is not None]
            run = partial(_hand_over, leaves, edges, tensors)
            all_steps.append(Step(run, reads, [self._not_handed_over[position] for position in positions]))
        return all_steps

    def _outputs_of(self, index: int) -> list[fx.Node]:
        """Returns the values of a segment that a later segment or the caller reads."""
        later, nodes = self._nodes_after(index), self._cuts[index].nodes
        repeated = self._free - set(nodes)
        values = [value for node in nodes for value in output_nodes_of(node)]
        return [value for value in dict.fromkeys(values) if _is_read(value, later, repeated.__contains__)]

    def _dead_inputs(self, index: int, inputs: Sequence[fx.Node]) -> list[fx.Node]:
        """Returns the inputs of a segment that are dead after it, views included, and whose memory it may overwrite.

        A result of ONNX Runtime may be a constant that all runs share, so only products of it count.
        """
        later, runner = self._nodes_after(index), self._assignment.runner
        owned = [node for node in inputs if node in runner and is_reusable(node, runner[node])]
        return [node for node in owned if not _is_read(node, later, lambda user: is_view(user) or is_getitem(user))]

    def _nodes_after(self, index: int) -> set[fx.Node]:
        return {node for other in self._cuts[index + 1 :] for node in other.nodes}

    def _step(self, index: int, item: Cut) -> Step:
        outputs = self._outputs_of(index)
        body = body_of(item.nodes, outputs, self._free)
        if item.runner is Runner.ORT:
            try:
                return self._ort_step(index, body, outputs)
            except Exception as error:  # PyTorch can run whatever ONNX Runtime refuses here
                refusal = _refusal(error)
                item.runner = self.records[index].runner = Runner.PYTORCH
                self._assignment.leave_to_pytorch(item.nodes, refusal)
        return self._pytorch_step(body, outputs, self._dead_inputs(index, body.inputs))

    def _ort_step(self, index: int, body: Body, outputs: list[fx.Node]) -> Step:
        lowering, record, name = self._lowering, self.records[index], f"{self._name} part {index}"
        model = build(body, outputs, lowering.opset, self._assignment.called)
        fallback = Fallback(Twin(body, outputs, self._module), lowering.failed)
        frees_inputs = self._name.startswith("backward")  # the caller holds the inputs of a forward in any case
        segment = OrtSegment(model, lowering.sessions, self._is_lasting, fallback, name, record, frees_inputs)
        run: Run = segment
        if lowering.generator is not None:
            graph = SegmentGraph(body, outputs, self._assignment.called)
            run = lowering.generator.watch(segment, graph, self._is_lasting, name)
        return self._numbered(run, segment.inputs, outputs)

    def _pytorch_step(self, body: Body, outputs: list[fx.Node], dead: Sequence[fx.Node] = ()) -> Step:
        segment = PyTorchSegment(body, outputs, self._module, dead)
        return self._numbered(segment, segment.inputs, outputs)

    def _weight_cast_step(self, placeholders: Sequence[fx.Node]) -> list[Step]:
        """Returns the step that computes the inputs which stand for casts of weights, if the graph has any."""
        named = {node.name: node for node in placeholders}
        casts = [node for node in placeholders if CAST_OF in node.meta]
        if not casts or (copies := self._lowering.copies) is None:
            return []
        run = CastWeights(copies, [node.meta["val"].dtype for node in casts])
        weights = [self._registers[named[node.meta[CAST_OF]]] for node in casts]
        return [Step(run, weights, [self._registers[node] for node in casts])]

    def _numbered(
        self, run: Callable[..., Sequence[object]], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> Step:
        reads = [self._registers[node] for node in inputs]
        for node in outputs:
            self._registers.setdefault(node, len(self._registers) + len(self._not_handed_over))
        return Step(run, reads, [self._registers[node] for node in outputs])

    def _output(self, item: Argument) -> int | None:
        """Returns the register of an output, `SIZE` for a size, or None for no value."""
        if item is None:
            return None
        return self._registers[item] if isinstance(item, fx.Node) and not is_size(item) else SIZE


class CastWeights:
    """A segment that casts weights, or takes the casts of an earlier micro-batch."""

    def __init__(self, copies: WeightCopies, dtypes: Sequence[torch.dtype]) -> None:
        self._copies, self._dtypes = copies, dtypes

    def __call__(self, weights: list[torch.Tensor], _: dict[str, int]) -> Sequence[torch.Tensor]:
        """Returns the casts of these weights."""
        return self._copies.cast(weights, self._dtypes)


def _is_read(value: fx.Node, later: set[fx.Node], looks_through: Callable[[fx.Node], bool]) -> bool:
    """True if a later node or the caller reads a value, or a view of it that `looks_through` accepts."""
    pending = list(value.users)
    while pending:
        user = pending.pop()
        if user in later or user.op == "output":
            return True
        if looks_through(user):
            pending.extend(user.users)
    return False


def _hand_over(
    leaves: GradientRelease, edges: Sequence[int], tensors: int, gradients: list[torch.Tensor], _: dict[str, int]
) -> Sequence[object]:
    return leaves.hand_over(gradients, edges, tensors)


def _is_size(item: Argument) -> bool:
    return isinstance(item, int) or (isinstance(item, fx.Node) and is_size(item))
