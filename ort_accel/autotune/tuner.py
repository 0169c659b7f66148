"""Divides a graph by timing: first kinds of nodes, then the whole graph in each promising division."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ort_accel.autotune import handover_cost
from ort_accel.autotune.min_cut import Costs, cheapest
from ort_accel.autotune.node_kinds import Kind, kinds_in, text_of
from ort_accel.autotune.synthetic_inputs import symbols_of, synthetic_inputs
from ort_accel.autotune.timer import SavedTimings, Seconds, Stopwatch, isolated
from ort_accel.errors import in_a_line
from ort_accel.executor.program import Program
from ort_accel.graph.nodes import fakes_in, is_getitem, is_size, is_watch_call, op_name
from ort_accel.kernels.attention_slim import SLIM_ATTENTION
from ort_accel.kernels.dropout_mask import kept
from ort_accel.kernels.packed_rows import ROW_OPERATORS
from ort_accel.lowering.registry import lowerings
from ort_accel.partition.assign import Assignment, Refusal
from ort_accel.partition.segments import readers_of
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report
from ort_accel.reporting.segments import Runner
from ort_accel.reporting.timings import Race
from ort_accel.runtime.sessions import Sessions

FEATURE = "compute.tuning.enabled"
UNMEASURED, ALONE = "as chosen without measuring", "PyTorch alone"
DIVISIONS = {"divided by measurement": 1.0, "divided more finely": 0.25}
"""Divisions to try, with the share of a handover's price to compute them with.

Results that are handed over together pay the price only once, so the full price is too high for them.
"""

EQUAL_RATIO = 1.02
"""Times whose ratio is smaller count as equal."""

PURE_NAMESPACES = {"aten", "prims"}
"""Namespaces whose operators only compute. Operators of others may send or count."""

OUT_OF_TIME = "compute.tuning.max_duration_ms is spent"

Build = Callable[[Assignment], Program]
Division = set[fx.Node]
"""The nodes that PyTorch runs although ONNX Runtime could."""


@dataclass
class Tuner:
    """Divides the graphs of one model."""

    opset: int
    sessions: Sessions
    stopwatch: Stopwatch
    results: SavedTimings
    report: Report
    only_saved: bool = False
    """Follow earlier results, and measure nothing: new measurements may choose differently from run to run."""
    _effects: list[str] = field(default_factory=list)

    def decide(
        self, module: fx.GraphModule, name: str, build: Build, assignment: Assignment
    ) -> Mapping[fx.Node, Refusal]:
        """Gives PyTorch the nodes of the fastest division. `build` makes a program for an assignment, to time it."""
        graph, kinds = module.graph, kinds_in(assignment)
        if not kinds:
            return {}
        text = text_of(graph, assignment)
        if known := self.results.get("graph", text):
            division = {node for node in graph.nodes if node.name in known["in_pytorch"]}
            return self._chosen(name, division, kinds, known["seconds"])
        if reason := self._obstacle(graph):
            return self._unmeasured(name, reason)
        try:
            with isolated(self.sessions.settings.place):
                self._time_kinds(module, kinds)
                divisions = self._divisions(assignment, kinds)
            programs = {
                label: build(assignment.with_refusals(_refusals(division))) for label, division in divisions.items()
            }
            with isolated(self.sessions.settings.place):
                seconds = self._time_programs(graph, programs)
        except Exception as error:
            return self._unmeasured(name, f"measuring failed with {in_a_line(error)}")
        if seconds is None:
            return self._unmeasured(name, OUT_OF_TIME)
        division = divisions[_best(seconds)]
        names = [node.name for node in graph.nodes if node in division]
        self.results.put({"seconds": seconds, "in_pytorch": names}, "graph", text)
        self.results.save()
        return self._chosen(name, division, kinds, seconds)

    def _obstacle(self, graph: fx.Graph) -> str:
        if self.only_saved:
            return (
                "engine.deterministic is on, and what is measured differs from run to run; run once without it, with "
                "compute.tuning.results naming a file, and that file is followed"
            )
        return f"not measured, since {reason}" if (reason := _side_effects(graph)) else ""

    def _time_kinds(self, module: fx.GraphModule, kinds: list[Kind]) -> None:
        """Measure kinds that have no result yet. Half of the time is left for whole graphs."""
        symbols = symbols_of(module.graph)
        if self.results.get("crossing") is None:
            self._keep(handover_cost.measure(self.opset, self.sessions, self.stopwatch, share=0.1), "crossing")
        reserve = self.stopwatch.left / 2
        for kind in kinds:
            if self.stopwatch.left < reserve:
                break
            if self.results.get("kind", kind.key) is None:
                runs = kind.runs(module, self.opset, self.sessions, symbols)
                self._keep(self.stopwatch.race(runs, share=0.25, in_a_row=3), "kind", kind.key)

    def _keep(self, seconds: Seconds | None, *subject: str) -> None:
        if seconds is not None:
            self.results.put({"seconds": seconds}, *subject)

    def _divisions(self, assignment: Assignment, kinds: list[Kind]) -> dict[str, Division]:
        """Returns the divisions that are worth timing as a whole, each once."""
        undecided = set(assignment.undecided)
        found: dict[str, Division] = {UNMEASURED: set(), ALONE: undecided}
        known = self.results.get("crossing")
        if known is None:
            return found
        handover = handover_cost.Handover.of(known["seconds"])
        costs = self._costs(assignment, kinds, handover)
        readers = readers_of(costs, assignment.free)
        for label, share in DIVISIONS.items():
            division = cheapest(costs, readers, handover.price * share) & undecided
            if division not in found.values():
                found[label] = division
        return found

    def _costs(
        self, assignment: Assignment, kinds: list[Kind], handover: handover_cost.Handover
    ) -> Mapping[fx.Node, Costs]:
        """Returns what each node costs on either side. A node without a measurement cannot move."""
        costs = {
            node: Costs(0.0, float("inf")) if runner is Runner.ORT else Costs(float("inf"), 0.0)
            for node, runner in assignment.runner.items()
            if node not in assignment.free
        }
        for kind in kinds:
            if known := self.results.get("kind", kind.key):
                costs.update(dict.fromkeys(kind.nodes, handover.without_start(known["seconds"])))
        return costs

    def _time_programs(self, graph: fx.Graph, programs: Mapping[str, Program]) -> Seconds | None:
        inputs = synthetic_inputs(graph.find_nodes(op="placeholder"))
        return self.stopwatch.race({label: _call(program, inputs) for label, program in programs.items()})

    def _chosen(self, name: str, division: Division, kinds: list[Kind], whole: Seconds) -> Mapping[fx.Node, Refusal]:
        """Notes every measurement in the report. Returns why PyTorch runs the nodes of a division."""
        details: dict[fx.Node, str] = {}
        for kind in kinds:
            known = self.results.get("kind", kind.key)
            moved = [node for node in kind.nodes if node in division]
            if known:
                seconds, count = known["seconds"], len(kind.nodes)
                chosen = Runner.PYTORCH if moved else Runner.ORT
                self.report.races.append(Race(name, kind.subject, count, dict(seconds), chosen.value))
                details |= dict.fromkeys(moved, _in_words(seconds))
        best = _best(whole)
        self.report.races.append(Race(name, "the whole graph", 1, dict(whole), best))
        others = ", ".join(f"{_ms(whole[label])} {label}" for label in whole if label != best)
        self._effects.append(f"{name}: {_ms(whole[best])} {best}; {others}")
        self.report.applied(FEATURE, "; ".join(self._effects))
        return _refusals(division, details)

    def _unmeasured(self, name: str, reason: str) -> Mapping[fx.Node, Refusal]:
        self.report.note(f"{FEATURE}: {name}: {reason}")
        if not self._effects:
            self.report.refused(FEATURE, reason)
        return {}


def _best(seconds: Seconds) -> str:
    """Returns the fastest division, or PyTorch alone if it is about as fast: it needs no handover."""
    fastest = min(seconds, key=seconds.__getitem__)
    return ALONE if seconds[ALONE] <= seconds[fastest] * EQUAL_RATIO else fastest


def _refusals(division: Division, details: Mapping[fx.Node, str] = MappingProxyType({})) -> dict[fx.Node, Refusal]:
    return {node: Refusal(Reason.SLOWER, details.get(node, "the graph as a whole")) for node in division}


def _side_effects(graph: fx.Graph) -> str:
    """Returns why the graph must not run with synthetic inputs before the training begins; empty if it may."""
    for node in graph.nodes:
        if node.op != "call_function" or is_getitem(node) or is_size(node):
            continue
        target = node.target
        if is_watch_call(node) or not (target in lowerings() or target is kept or _only_computes(target)):
            return f"{op_name(node)} may do more than compute"
        if free_unbacked_symbols(fakes_in(node.meta["val"])):
            return f"the sizes that {op_name(node)} gives depend on data"
    return ""


def _only_computes(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace in PURE_NAMESPACES or target.overloadpacket in ROW_OPERATORS | SLIM_ATTENTION


def _call(program: Program, inputs: list[object]) -> Callable[[], object]:
    return lambda: program(list(inputs))


def _in_words(seconds: Seconds) -> str:
    return f"{_ms(seconds[Runner.PYTORCH.value])} in PyTorch, {_ms(seconds[Runner.ORT.value])} in ONNX Runtime"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
