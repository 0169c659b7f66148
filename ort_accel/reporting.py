"""The record of features, fallbacks, segments and measurements of a model. `observe/` renders it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol, TypeAlias

from ort_accel.memory_records import GraphMemory, MeasuredPeak


class State(StrEnum):
    """The state of a feature."""

    APPLIED = "applied"
    REFUSED = "refused"
    OFF = "off"


class Reason(StrEnum):
    """The reason why PyTorch runs an operator."""

    UNSUPPORTED_OP = "unsupported operator"
    UNSUPPORTED_DTYPE = "unsupported dtype"
    DATA_DEPENDENT = "data-dependent shape"
    CHECK = "checks what a tensor holds"
    RANDOM = "random"
    ATTENTION = "attention"
    ONE_STEP = "many operators in one step"
    SLOWER = "slower by measurement"
    SLOWER_ELSEWHERE = "slower by measurements on other machines"
    SMALL = "too small to be worth a crossing"
    NEIGHBOUR = "next to what PyTorch runs faster"
    MUTATION = "changes its input"
    GRAPH_BREAK = "not captured"
    NOT_COMPILED = "failed to compile"
    WISH = "asked for in the configuration"
    FAILED = "failed in ONNX Runtime"
    ELSEWHERE = "on another device"
    ENDED_RUNS = "ended earlier runs in ONNX Runtime"

    @property
    def is_choice(self) -> bool:
        """True if PyTorch runs the operator by choice, False if ONNX Runtime cannot."""
        return self in CHOICES


CHOICES = {
    Reason.CHECK,
    Reason.RANDOM,
    Reason.ATTENTION,
    Reason.ONE_STEP,
    Reason.SLOWER,
    Reason.SLOWER_ELSEWHERE,
    Reason.SMALL,
    Reason.NEIGHBOUR,
    Reason.WISH,
    Reason.ELSEWHERE,
}


COVERAGE = (
    "sessions",
    "nodes",
    "nodes_in_onnxruntime",
    "nodes_by_ort_accel_in_onnxruntime",
    "nodes_by_pytorch_in_onnxruntime",
    "flops",
    "flops_in_onnxruntime",
    "flops_by_pytorch_in_onnxruntime",
)
"""The numbers of `Report.coverage`. Kernels of ort_accel and of PyTorch that a session calls count as in ONNX Runtime,
and apart."""


class Runner(StrEnum):
    """The runtime that runs a segment."""

    ORT = "onnxruntime"
    PYTORCH = "pytorch"
    INDUCTOR = "inductor"
    """A program that PyTorch's Inductor has written for the whole segment."""


class Kernels(StrEnum):
    """The kernels that compute a node, and the side that calls them."""

    ORT = "ONNX Runtime's kernels"
    NATIVE = "ort_accel's native kernels"
    CALLED = "PyTorch's kernels, called by ONNX Runtime"
    OUTSIDE = "PyTorch, outside of ONNX Runtime"


@dataclass(frozen=True)
class Feature:
    """One feature: applied with an effect, refused for a reason, or off."""

    name: str
    state: State
    reason: str = ""
    effect: str = ""


@dataclass
class Segment:
    """A run of neighbouring nodes that one runner executes."""

    graph: str
    """The name of its graph, such as `forward 0`."""
    runner: Runner
    """The last runner: PyTorch, too, where ONNX Runtime failed."""
    ops: dict[str, int]
    """The number of nodes of each operator."""
    flops: float = 0.0
    """Floating point operations of its matrix products and convolutions, at the sizes it was compiled with."""
    called_nodes: int = 0
    """The nodes of a session that are calls of PyTorch's kernels."""
    called_flops: float = 0.0
    own_nodes: int = 0
    """The nodes of a session that are calls of ort_accel's kernels."""
    own_flops: float = 0.0

    @property
    def nodes(self) -> int:
        """Returns the number of nodes."""
        return sum(self.ops.values())

    def coverage(self) -> tuple[float, ...]:
        """Returns what it adds to the numbers of `Report.coverage`."""
        share = self.runner is Runner.ORT  # 1 or 0
        nodes = self.nodes, share * self.nodes, share * self.own_nodes, share * self.called_nodes
        return share, *nodes, self.flops, share * self.flops, share * self.called_flops

    def work(self) -> dict[Kernels, tuple[int, float]]:
        """Returns the nodes and the FLOPs of each side's kernels."""
        if self.runner is not Runner.ORT:
            return {Kernels.OUTSIDE: (self.nodes, self.flops)}
        native, called = (self.own_nodes, self.own_flops), (self.called_nodes, self.called_flops)
        rest = self.nodes - native[0] - called[0], self.flops - native[1] - called[1]
        return {Kernels.ORT: rest, Kernels.NATIVE: native, Kernels.CALLED: called}


_FallbackKind: TypeAlias = tuple[str, Reason, str, bool]
"""The operator, reason and detail of a fallback, and whether a session calls it."""


@dataclass(frozen=True)
class Fallback:
    """An operator that PyTorch's kernel computes, the reason, and the number of nodes."""

    op: str
    reason: Reason
    count: int
    detail: str = ""
    where: str = field(default="", compare=False)
    """The first line of the model's code that uses the operator."""
    is_called: bool = False
    """True if a session of ONNX Runtime calls PyTorch's kernel. The graph is not cut there."""

    @property
    def is_forced(self) -> bool:
        """True if the node runs outside ONNX Runtime's sessions because ONNX Runtime cannot run it."""
        return not self.is_called and not self.reason.is_choice


class Fallbacks(list[Fallback]):
    """A list of fallbacks that shows itself as a table: as text, and in a notebook."""

    as_table: ClassVar[Callable[[Sequence[Fallback]], str]] = list.__repr__
    as_html: ClassVar[Callable[[Sequence[Fallback]], str]] = list.__repr__
    """The renderers; `observe` sets them, since this room is below it."""

    def __repr__(self) -> str:
        return type(self).as_table(self)

    def _repr_html_(self) -> str:
        return type(self).as_html(self)


@dataclass(frozen=True)
class Point:
    """A figure of one step, or of several consecutive steps."""

    step: int
    """The first step."""
    count: int
    """The number of steps."""
    mean: float
    low: float
    high: float


class Series:
    """A figure over the steps of a training. In a long series each point stands for several steps."""

    MAX_POINTS = 512
    """The most points that are kept. Beyond it, neighbours are joined."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._steps_per_point = 1

    def add(self, step: int, value: float) -> None:
        """Add the figure of the next step."""
        point = Point(step, 1, value, value, value)
        if self.points and self.points[-1].count < self._steps_per_point:
            point = _joined(self.points.pop(), point)
        self.points.append(point)
        if len(self.points) > self.MAX_POINTS:
            self._steps_per_point *= 2
            halves = self.points[::2], self.points[1::2]
            last = self.points[-1:] if len(self.points) % 2 else []
            self.points = [_joined(one, other) for one, other in zip(*halves, strict=False)] + last


def _joined(one: Point, other: Point) -> Point:
    count = one.count + other.count
    mean = (one.mean * one.count + other.mean * other.count) / count
    return Point(one.step, count, mean, min(one.low, other.low), max(one.high, other.high))


@dataclass(frozen=True)
class LoadBalance:
    """The work of each process in the steps of an epoch: a row for each step, a number for each process."""

    before: list[list[float]]
    """The work without balancing."""
    after: list[list[float]]
    every: int
    """The distance between two steps that are kept here."""
    waiting_before: float
    """The share of all processes' time spent waiting for the slowest process, over all steps."""
    waiting_after: float


@dataclass(frozen=True)
class InputDensity:
    """The valid share of one input of one batch."""

    step: int
    kind: str
    """EMBED for tokens, LABEL for labels."""
    name: str
    pad: int | None
    """The value at positions that do not count, if known."""
    valid: int
    total: int
    rows: tuple[int, ...]
    """The number of valid tokens in each row."""

    @property
    def density(self) -> float:
        """Returns the valid share."""
        return self.valid / self.total


@dataclass(frozen=True)
class BatchingScheme:
    """A batching scheme, and the FLOPs that it spends on all inspected batches."""

    name: str
    flops: float
    """Estimated FLOPs of forward and backward."""


@dataclass(frozen=True)
class Inspection:
    """The density of inspected batches, and the FLOPs of other batching schemes."""

    rows: list[InputDensity]
    """The inputs of the batches since the previous table."""
    batches: int
    """The number of batches behind the other figures."""
    ways: list[BatchingScheme]
    """The schemes, dense first; the last one computes valid tokens only."""
    processes: int
    waiting: tuple[float, float] | None
    """The shares of time that the processes would wait for the slowest, without and with load balancing."""


@dataclass(frozen=True)
class Race:
    """Alternatives that were timed against each other, and the chosen one."""

    graph: str
    subject: str
    count: int
    """The number of nodes that the choice holds for."""
    seconds: dict[str, float]
    chosen: str


KERNELS_AWAITED = "segments that wait for generated code"
KERNELS_READY, KERNELS_TRIED = "segments with generated code", "segments whose generated code was tried"
"""Counters. While the second is greater than the third, segments run with and without generated code in turn. A segment
counts once for each kind of code."""

ENGINE, EAGER = "ort_accel", "eager PyTorch"
"""The runners of a whole training step."""


@dataclass(frozen=True)
class StepComparison:
    """The last comparison of the engine's training steps with eager PyTorch's."""

    runner: str
    """The runner of the steps that follow: `ort_accel` or `eager PyTorch`."""
    ratio: float
    """The time of the engine's step as a multiple of eager PyTorch's; the median of the last pairs."""
    pairs: int
    """The number of pairs of steps compared since the training began."""
    step: int
    """The training step of the last comparison."""
    eager_seconds: float = 0.0
    """The time of forward and backward in eager PyTorch, the median of the compared steps; 0 if it is not known."""

    @property
    def is_on_engine(self) -> bool:
        return self.runner == ENGINE

    def __str__(self) -> str:
        took = f"a training step takes {self.ratio:.2f} times as long on the engine as in eager PyTorch"
        return f"{took} ({self.pairs} pairs of steps, the last at step {self.step}); {self.runner} runs the next ones"


class Watcher(Protocol):
    """A listener that is told when phases of start-up work begin and end."""

    def begin(self, phase: str, graph: str) -> None:
        """A phase of start-up work begins, on a graph or, with an empty name, on no graph in particular."""

    def end(self) -> None:
        """The innermost phase ends."""


@dataclass(repr=False)
class Report:
    """The decisions and measurements of an accelerated model: a table when printed, a page in a notebook."""

    as_table: ClassVar[Callable[[Report], str]] = repr
    as_html: ClassVar[Callable[[Report], str]] = repr
    """The renderers; `observe` sets them, since this room is below it."""

    versions: dict[str, str] = field(default_factory=dict)
    """The versions of the packages."""
    features: dict[str, Feature] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    """The timings of `compute.tuning`, and of segments with and without generated kernels."""
    comparison: StepComparison | None = None
    """None if no steps were compared with eager PyTorch's."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of start-up work by phase. The time of a phase excludes phases nested in it."""
    counters: Counter[str] = field(default_factory=Counter)
    """Counts of events: compilations, fusions by name, recompile limits hit."""
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """Every key of the configuration, with its value."""
    series: dict[str, Series] = field(default_factory=dict)
    """Figures over the steps, by their names in a Trainer's log."""
    load_balance: LoadBalance | None = None
    inspection: Inspection | None = None
    memory: dict[str, GraphMemory] = field(default_factory=dict)
    """The memory of each forward graph with a backward."""
    measured_peak: MeasuredPeak | None = None
    watchers: list[Watcher] = field(default_factory=list, repr=False, compare=False)
    _fallbacks: Counter[_FallbackKind] = field(default_factory=Counter)
    _lines: dict[_FallbackKind, str] = field(default_factory=dict)
    _nested_seconds: list[float] = field(default_factory=list, repr=False, compare=False)
    """For each open phase: the seconds of the phases nested in it."""

    def applied(self, name: str, effect: str = "") -> None:
        """Record that a feature is in effect, with its effect."""
        self.features[name] = Feature(name, State.APPLIED, effect=effect)

    def refused(self, name: str, reason: str) -> None:
        """Record that a feature was asked for and is not in effect, with the reason."""
        self.features[name] = Feature(name, State.REFUSED, reason=reason)

    def off(self, name: str, reason: str = "") -> None:
        """Record that a feature is off."""
        self.features[name] = Feature(name, State.OFF, reason=reason)

    def fallback(
        self, op: str, reason: Reason, detail: str = "", count: int = 1, where: str = "", *, is_called: bool = False
    ) -> None:
        """Record nodes that PyTorch's kernels compute, outside sessions or called from one."""
        kind = op, reason, detail, is_called
        self._fallbacks[kind] += count
        self._lines.setdefault(kind, where)

    def note(self, text: str) -> None:
        """Record a note for the user; the same note is kept once."""
        if text not in self.notes:
            self.notes.append(text)

    def measured(self, name: str, step: int, value: float) -> None:
        """Record a figure of one step."""
        self.series.setdefault(name, Series()).add(step, value)

    def graph_entries(self, since: Report | None = None) -> Report:
        """Return a copy of the entries about graphs: all of them, or those that were added since an earlier copy."""
        before = since or Report()
        fallbacks = self._fallbacks - before._fallbacks
        return Report(
            features={key: item for key, item in self.features.items() if before.features.get(key) != item},
            segments=self.segments[len(before.segments) :],
            races=self.races[len(before.races) :],
            counters=self.counters - before.counters,
            notes=self.notes[len(before.notes) :],
            memory={key: item for key, item in self.memory.items() if before.memory.get(key) != item},
            _fallbacks=fallbacks,
            _lines={key: self._lines[key] for key in fallbacks},
        )

    def add(self, entries: Report) -> None:
        """Add the entries about graphs of another report."""
        self.features.update(entries.features)
        self.segments.extend(entries.segments)
        self.races.extend(entries.races)
        self.counters.update(entries.counters)
        for text in entries.notes:
            self.note(text)
        self.memory.update(entries.memory)
        self._fallbacks.update(entries._fallbacks)
        self._lines = entries._lines | self._lines

    @contextmanager
    def timed(self, phase: str, graph: str = "") -> Iterator[None]:
        """Add the time spent within the context to a phase."""
        for watcher in self.watchers:
            watcher.begin(phase, graph)
        self._nested_seconds.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.timings[phase] = self.timings.get(phase, 0.0) + spent - self._nested_seconds.pop()
            if self._nested_seconds:
                self._nested_seconds[-1] += spent
            for watcher in self.watchers:
                watcher.end()

    def __str__(self) -> str:
        return type(self).as_table(self)

    def __repr__(self) -> str:
        counted = f"{len(self.segments)} segments, {len(self._fallbacks)} kinds of fallbacks"
        return f"<Report of ort_accel: {counted}; print(report) shows it, report.to_dict() has all of it>"

    def _repr_html_(self) -> str:
        return type(self).as_html(self)

    @property
    def work(self) -> tuple[float, float]:
        """Returns the FLOPs on ONNX Runtime and all captured FLOPs; numbers of nodes where no segment has FLOPs."""
        has_flops = any(segment.flops for segment in self.segments)
        amounts = [(segment.runner, segment.flops if has_flops else segment.nodes) for segment in self.segments]
        ours = sum(amount for runner, amount in amounts if runner is Runner.ORT)
        return ours, sum(amount for _, amount in amounts)

    @property
    def coverage(self) -> dict[str, dict[str, float]]:
        """Returns by direction what runs in sessions of ONNX Runtime, and whose kernels compute it."""
        found: dict[str, dict[str, float]] = {}
        for segment in self.segments:
            shares = found.setdefault(segment.graph.split()[0], dict.fromkeys(COVERAGE, 0))
            for name, amount in zip(COVERAGE, segment.coverage(), strict=True):
                shares[name] += amount
        return found

    @property
    def kernels(self) -> dict[Kernels, tuple[int, float]]:
        """Returns the nodes and the estimated FLOPs of each side's kernels."""
        work = [segment.work() for segment in self.segments]
        found = {kernels: [part[kernels] for part in work if kernels in part] for kernels in Kernels}
        return {kernels: (sum(n for n, _ in parts), sum(f for _, f in parts)) for kernels, parts in found.items()}

    @property
    def set_up_seconds(self) -> float:
        """Returns the seconds of all phases of start-up work."""
        return sum(self.timings.values())

    @property
    def fallbacks(self) -> Fallbacks:
        """Returns the operators that PyTorch's kernels compute, most frequent first."""
        return Fallbacks(
            Fallback(op, reason, count, detail, self._lines[op, reason, detail, is_called], is_called)
            for (op, reason, detail, is_called), count in self._fallbacks.most_common()
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole record as plain data, for JSON."""
        return {
            "versions": dict(self.versions),
            "features": [
                {"name": f.name, "state": f.state.value, "reason": f.reason, "effect": f.effect}
                for f in self.features.values()
            ],
            "coverage": self.coverage,
            "kernels": [
                {"kernels": kernels.value, "nodes": nodes, "flops": work}
                for kernels, (nodes, work) in self.kernels.items()
            ],
            "segments": [
                {"graph": s.graph, "runner": s.runner.value, "nodes": s.nodes, "ops": dict(s.ops), "flops": s.flops}
                for s in self.segments
            ],
            "fallbacks": [asdict(f) | {"reason": f.reason.value} for f in self.fallbacks],
            "races": [asdict(item) for item in self.races],
            "comparison": asdict(self.comparison) if self.comparison else None,
            "memory": [asdict(item) for item in self.memory.values()],
            "measured_peak": asdict(self.measured_peak) if self.measured_peak else None,
            "timings": dict(self.timings),
            "counters": dict(self.counters),
            "notes": list(self.notes),
            "series": {name: [asdict(point) for point in series.points] for name, series in self.series.items()},
            "load_balance": asdict(self.load_balance) if self.load_balance else None,
            "inspection": asdict(self.inspection) if self.inspection else None,
            "config": dict(self.config),
        }
