"""Who runs what in a graph, chosen by timing: first kind by kind, then the whole graph in each promising division."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from ort_accel.autotune import handover_cost
from ort_accel.autotune.isolated import unnoticed
from ort_accel.autotune.measurable import obstacle
from ort_accel.autotune.min_cut import Costs, cheapest
from ort_accel.autotune.node_kinds import Kind, kinds_in, text_of
from ort_accel.autotune.synthetic_inputs import made_up_inputs, symbols_of
from ort_accel.autotune.timer import Results, Seconds, Stopwatch
from ort_accel.errors import in_a_line
from ort_accel.executor.program import Program
from ort_accel.partition.assign import Refusal
from ort_accel.partition.segments import Assignment, readers_of
from ort_accel.reporting import Race, Reason, Report, Runner
from ort_accel.runtime.sessions import Sessions

FEATURE = "compute.tuning.enabled"
UNMEASURED, ALONE = "as chosen without measuring", "PyTorch alone"
DIVISIONS = {"divided by measurement": 1.0, "divided more finely": 0.25}
"""Shares of the price of changing hands to divide with: results that travel together pay it only once."""

ABOUT = 1.02
"""Times that differ by less are taken for equal."""

OUT_OF_TIME = "compute.tuning.max_duration_ms is spent"

Make = Callable[[Assignment], Program]
Division = set[fx.Node]
"""The nodes that PyTorch runs although ONNX Runtime could."""


@dataclass
class Tuner:
    """Chooses for the graphs of one model."""

    opset: int
    sessions: Sessions
    stopwatch: Stopwatch
    results: Results
    report: Report
    only_saved: bool = False
    """Follow earlier results, and measure nothing: what is chosen by timing differs from run to run."""
    _effects: list[str] = field(default_factory=list)

    def choose(self, module: fx.GraphModule, name: str, assignment: Assignment, make: Make) -> Assignment:
        """The assignment to run with; `make` builds a program for one, to try it."""
        graph, kinds = module.graph, kinds_in(assignment)
        if not kinds:
            return assignment
        text = text_of(graph, assignment)
        if known := self.results.get("graph", text):
            division = {node for node in graph.nodes if node.name in known["in_pytorch"]}
            return self._chosen(name, assignment, division, kinds, known["seconds"])
        if reason := self._refusal(graph):
            return self._unmeasured(name, assignment, reason)
        try:
            with unnoticed(self.sessions.settings.place):
                self._time_kinds(module, kinds)
                divisions = self._divisions(assignment, kinds)
            programs = {label: make(_moved(assignment, division, {})) for label, division in divisions.items()}
            with unnoticed(self.sessions.settings.place):
                seconds = self._time_programs(name, graph, programs)
        except Exception as error:
            return self._unmeasured(name, assignment, f"measuring failed with {in_a_line(error)}")
        if seconds is None:
            return self._unmeasured(name, assignment, OUT_OF_TIME)
        division = divisions[_best(seconds)]
        names = [node.name for node in graph.nodes if node in division]
        self.results.put({"seconds": seconds, "in_pytorch": names}, "graph", text)
        self.results.save()
        return self._chosen(name, assignment, division, kinds, seconds)

    def _refusal(self, graph: fx.Graph) -> str:
        if self.only_saved:
            return (
                "engine.deterministic is on, and what is measured differs from run to run; run once without it, with "
                "compute.tuning.results naming a file, and that file is followed"
            )
        return f"not measured, since {reason}" if (reason := obstacle(graph)) else ""

    def _time_kinds(self, module: fx.GraphModule, kinds: list[Kind]) -> None:
        """Measure what is not known yet, as long as half of the time is left for whole graphs."""
        symbols = symbols_of(module.graph)
        if self.results.get("crossing") is None:
            runs = handover_cost.runs(self.opset, self.sessions)
            self._keep(self.stopwatch.race(handover_cost.SUBJECT, runs, share=0.1), "crossing")
        reserve = self.stopwatch.left / 2
        for kind in kinds:
            if self.stopwatch.left < reserve:
                break
            if self.results.get("kind", kind.key) is None:
                runs = kind.runs(module, self.opset, self.sessions, symbols)
                self._keep(self.stopwatch.race(kind.subject, runs, share=0.25, in_a_row=3), "kind", kind.key)

    def _keep(self, seconds: Seconds | None, *subject: str) -> None:
        if seconds is not None:
            self.results.put({"seconds": seconds}, *subject)

    def _divisions(self, assignment: Assignment, kinds: list[Kind]) -> dict[str, Division]:
        """What is worth trying as a whole, each once."""
        ours = {node for node, runner in assignment.runner.items() if runner is Runner.ORT} - assignment.free
        found: dict[str, Division] = {UNMEASURED: set(), ALONE: ours}
        known = self.results.get("crossing")
        if known is None:
            return found
        handover = handover_cost.handover(known["seconds"])
        costs = self._costs(assignment, kinds, handover)
        readers = readers_of(costs, assignment.free)
        for label, share in DIVISIONS.items():
            division = cheapest(costs, readers, handover.price * share) & ours
            if division not in found.values():
                found[label] = division
        return found

    def _costs(
        self, assignment: Assignment, kinds: list[Kind], handover: handover_cost.Handover
    ) -> Mapping[fx.Node, Costs]:
        """What each node takes on either side. What is not known stays where it would be anyway."""
        costs = {
            node: Costs(0.0, float("inf")) if runner is Runner.ORT else Costs(float("inf"), 0.0)
            for node, runner in assignment.runner.items()
            if node not in assignment.free
        }
        for kind in kinds:
            if known := self.results.get("kind", kind.key):
                seconds = known["seconds"]
                ort = max(0.0, seconds[Runner.ORT.value] - handover.ort)
                pytorch = max(0.0, seconds[Runner.PYTORCH.value] - handover.pytorch)
                costs.update(dict.fromkeys(kind.nodes, Costs(ort, pytorch)))
        return costs

    def _time_programs(self, name: str, graph: fx.Graph, programs: Mapping[str, Program]) -> Seconds | None:
        inputs = made_up_inputs(graph.find_nodes(op="placeholder"))
        return self.stopwatch.race(name, {label: _call(program, inputs) for label, program in programs.items()})

    def _chosen(
        self, name: str, assignment: Assignment, division: Division, kinds: list[Kind], whole: Seconds
    ) -> Assignment:
        """The assignment for a division, with every figure that speaks for it in the report."""
        why: dict[fx.Node, str] = {}
        for kind in kinds:
            known = self.results.get("kind", kind.key)
            moved = [node for node in kind.nodes if node in division]
            if known:
                seconds, count = known["seconds"], len(kind.nodes)
                chosen = Runner.PYTORCH if moved else Runner.ORT
                self.report.races.append(Race(name, kind.subject, count, dict(seconds), chosen.value))
                why |= dict.fromkeys(moved, _in_words(seconds))
        best = _best(whole)
        self.report.races.append(Race(name, "the whole graph", 1, dict(whole), best))
        others = ", ".join(f"{_ms(whole[label])} {label}" for label in whole if label != best)
        self._effects.append(f"{name}: {_ms(whole[best])} {best}; {others}")
        self.report.applied(FEATURE, "; ".join(self._effects))
        return _moved(assignment, division, why)

    def _unmeasured(self, name: str, assignment: Assignment, reason: str) -> Assignment:
        self.report.note(f"{FEATURE}: {name}: {reason}")
        if not self._effects:
            self.report.refused(FEATURE, reason)
        return assignment


def _best(seconds: Seconds) -> str:
    """The fastest, or PyTorch alone if it is about as fast: then nothing changes hands."""
    fastest = min(seconds, key=seconds.__getitem__)
    return ALONE if seconds[ALONE] <= seconds[fastest] * ABOUT else fastest


def _moved(assignment: Assignment, division: Division, why: Mapping[fx.Node, str]) -> Assignment:
    """The assignment in which PyTorch runs these nodes, too."""
    runner = {node: Runner.PYTORCH if node in division else one for node, one in assignment.runner.items()}
    refusals = {node: Refusal(Reason.SLOWER, why.get(node, "the graph as a whole")) for node in division}
    return replace(assignment, runner=runner, refusals=assignment.refusals | refusals)


def _call(program: Program, inputs: list[object]) -> Callable[[], object]:
    return lambda: program(list(inputs))


def _in_words(seconds: Seconds) -> str:
    return f"{_ms(seconds[Runner.PYTORCH.value])} in PyTorch, {_ms(seconds[Runner.ORT.value])} in ONNX Runtime"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
