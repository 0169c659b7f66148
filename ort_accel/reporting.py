"""What was applied, what was refused and why, what ran where. A record only: `observe/` renders it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from ort_accel.memory_records import GraphMemory, MeasuredPeak


class State(StrEnum):
    """What became of a feature."""

    APPLIED = "applied"
    REFUSED = "refused"
    OFF = "off"


class Reason(StrEnum):
    """Why PyTorch runs an operator."""

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
    MUTATION = "changes its input"
    GRAPH_BREAK = "not captured"
    NOT_COMPILED = "failed to compile"
    WISH = "asked for in the configuration"
    FAILED = "failed in ONNX Runtime"
    ELSEWHERE = "on another device"
    ENDED_RUNS = "ended earlier runs in ONNX Runtime"

    @property
    def is_choice(self) -> bool:
        """True if PyTorch runs it by design or because it is the better choice, not because ONNX Runtime cannot."""
        return self in CHOICES


CHOICES = {
    Reason.CHECK,
    Reason.RANDOM,
    Reason.ATTENTION,
    Reason.ONE_STEP,
    Reason.SLOWER,
    Reason.SLOWER_ELSEWHERE,
    Reason.SMALL,
    Reason.WISH,
    Reason.ELSEWHERE,
}


class Runner(StrEnum):
    """Who runs a segment."""

    ORT = "onnxruntime"
    PYTORCH = "pytorch"


@dataclass(frozen=True)
class Feature:
    """One feature: applied with an effect that was measured, refused for a reason, or off."""

    name: str
    state: State
    reason: str = ""
    effect: str = ""


@dataclass
class Segment:
    """A run of neighbouring nodes that one runner executes."""

    graph: str
    """Which graph it is part of, such as `forward 0`."""
    runner: Runner
    """Who ran it last: PyTorch, too, where ONNX Runtime failed at it, or where oneDNN took the sizes over."""
    ops: dict[str, int]
    """How many nodes of each operator."""
    flops: float = 0.0
    """Floating point operations of its matrix products and convolutions, at the sizes it was compiled with."""

    @property
    def nodes(self) -> int:
        """Returns how many nodes it has."""
        return sum(self.ops.values())


@dataclass(frozen=True)
class Fallback:
    """An operator that PyTorch runs, why, and how many of its nodes."""

    op: str
    reason: Reason
    count: int
    detail: str = ""
    where: str = field(default="", compare=False)
    """The first line of the model's code that asks for it."""


@dataclass(frozen=True)
class Point:
    """What was measured in one step, or in several steps one after the other."""

    step: int
    """The first of them."""
    count: int
    """How many there are."""
    mean: float
    low: float
    high: float


class Series:
    """A figure over the steps of a training. A long one has fewer points than steps, each for as many steps."""

    MOST = 512
    """Points that are kept at most; then neighbours become one."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._each = 1

    def add(self, step: int, value: float) -> None:
        """Add what was measured in the next step."""
        point = Point(step, 1, value, value, value)
        if self.points and self.points[-1].count < self._each:
            point = _together(self.points.pop(), point)
        self.points.append(point)
        if len(self.points) > self.MOST:
            self._each *= 2
            halves = self.points[::2], self.points[1::2]
            last = self.points[-1:] if len(self.points) % 2 else []
            self.points = [_together(one, other) for one, other in zip(*halves, strict=False)] + last


def _together(one: Point, other: Point) -> Point:
    count = one.count + other.count
    mean = (one.mean * one.count + other.mean * other.count) / count
    return Point(one.step, count, mean, min(one.low, other.low), max(one.high, other.high))


@dataclass(frozen=True)
class LoadBalance:
    """The work of each process in the steps of an epoch: a row for each step, a number for each process."""

    before: list[list[float]]
    """As samples would be dealt without balancing."""
    after: list[list[float]]
    every: int
    """One of so many steps is kept here."""
    waiting_before: float
    """The share of all processes' time spent waiting for the slowest of each step, over all steps."""
    waiting_after: float


@dataclass(frozen=True)
class InputDensity:
    """How much of one input of one batch counts."""

    step: int
    kind: str
    """EMBED for tokens, LABEL for labels."""
    name: str
    pad: int | None
    """What stands where nothing counts, if that is known."""
    valid: int
    total: int
    rows: tuple[int, ...]
    """How many count in each row."""

    @property
    def density(self) -> float:
        """Returns the share that counts."""
        return self.valid / self.total


@dataclass(frozen=True)
class Way:
    """A way of making batches, and what it computes for all that were looked at."""

    name: str
    flops: float
    """Estimated, of forward and backward."""


@dataclass(frozen=True)
class Inspection:
    """What batches hold, and what that means."""

    rows: list[InputDensity]
    """Of the batches since the table before."""
    batches: int
    """From how many batches the rest is worked out."""
    ways: list[Way]
    """Dense first; the last one computes only what counts."""
    processes: int
    waiting: tuple[float, float] | None
    """The share of time that so many processes would wait for the slowest, as batches came and with load balancing."""


@dataclass(frozen=True)
class Race:
    """Alternatives that were timed against each other, and what was chosen."""

    graph: str
    subject: str
    count: int
    """How many nodes it holds for."""
    seconds: dict[str, float]
    chosen: str


ENGINE, EAGER = "ort_accel", "eager PyTorch"
"""Who can run a whole training step."""


@dataclass(frozen=True)
class StepComparison:
    """Training steps of the engine beside eager PyTorch's, as they were last compared."""

    runner: str
    """Who runs the steps from then on: `ort_accel` or `eager PyTorch`."""
    ratio: float
    """How long the engine's step takes, in times of eager PyTorch's; the median of the last pairs."""
    pairs: int
    """How many pairs of steps were compared since the training began."""
    step: int
    """The training step at which they were last compared."""

    @property
    def is_on_engine(self) -> bool:
        return self.runner == ENGINE

    def __str__(self) -> str:
        took = f"a training step takes {self.ratio:.2f} times as long on the engine as in eager PyTorch"
        return f"{took} ({self.pairs} pairs of steps, the last at step {self.step}); {self.runner} runs the next ones"


class Watcher(Protocol):
    """Is told what is being done while it is done."""

    def begin(self, phase: str, graph: str) -> None:
        """Returns a phase of start-up work begins, on a graph or, where that is empty, on no graph in particular."""

    def end(self) -> None:
        """Returns the phase that began last ends."""


@dataclass(repr=False)
class Report:
    """Everything that was decided and measured while a model was accelerated. `print(report)` shows it as a table."""

    as_table: ClassVar[Callable[[Report], str]] = repr
    """Writes a report as text. `observe/feature_table.py` sets it, since this file knows nothing of rendering."""

    versions: dict[str, str] = field(default_factory=dict)
    """What was decided and measured with."""
    features: dict[str, Feature] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    """What `compute.tuning` timed."""
    comparison: StepComparison | None = None
    """None where no steps were compared with eager PyTorch's."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of start-up work, by phase; a phase inside of another counts for itself only."""
    counters: Counter[str] = field(default_factory=Counter)
    """How often something happened: compilations, fusions by name, recompile limits hit."""
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """Every key of the configuration, with its value."""
    series: dict[str, Series] = field(default_factory=dict)
    """Figures over the steps, under the names that they have in a Trainer's log."""
    load_balance: LoadBalance | None = None
    inspection: Inspection | None = None
    memory: dict[str, GraphMemory] = field(default_factory=dict)
    """For each forward graph with a backward: what it keeps and takes."""
    measured_peak: MeasuredPeak | None = None
    watchers: list[Watcher] = field(default_factory=list, repr=False, compare=False)
    _fallbacks: Counter[tuple[str, Reason, str]] = field(default_factory=Counter)
    _places: dict[tuple[str, Reason, str], str] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list, repr=False, compare=False)
    """For each phase that is open: the seconds of the phases inside of it."""

    def applied(self, name: str, effect: str = "") -> None:
        """Record that a feature is in effect, with its measured effect."""
        self.features[name] = Feature(name, State.APPLIED, effect=effect)

    def refused(self, name: str, reason: str) -> None:
        """Record that a feature was wanted and is not in effect, and why."""
        self.features[name] = Feature(name, State.REFUSED, reason=reason)

    def off(self, name: str, reason: str = "") -> None:
        """Record that a feature was not asked for."""
        self.features[name] = Feature(name, State.OFF, reason=reason)

    def fallback(self, op: str, reason: Reason, detail: str = "", count: int = 1, where: str = "") -> None:
        """Record nodes that PyTorch runs."""
        self._fallbacks[op, reason, detail] += count
        self._places.setdefault((op, reason, detail), where)

    def note(self, text: str) -> None:
        """Record something a user should know; the same note is kept once."""
        if text not in self.notes:
            self.notes.append(text)

    def measured(self, name: str, step: int, value: float) -> None:
        """Record a figure of one step."""
        self.series.setdefault(name, Series()).add(step, value)

    @contextmanager
    def timed(self, phase: str, graph: str = "") -> Iterator[None]:
        """Add the time spent inside to a phase."""
        for watcher in self.watchers:
            watcher.begin(phase, graph)
        self._inner.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.timings[phase] = self.timings.get(phase, 0.0) + spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent
            for watcher in self.watchers:
                watcher.end()

    def __str__(self) -> str:
        return type(self).as_table(self)

    def __repr__(self) -> str:
        counted = f"{len(self.segments)} segments, {len(self._fallbacks)} kinds of fallbacks"
        return f"<Report of ort_accel: {counted}; print(report) shows it, report.to_dict() has all of it>"

    @property
    def work(self) -> tuple[float, float]:
        """Returns the FLOPs that ONNX Runtime runs, and all that were captured; numbers of nodes where nothing has FLOPs."""
        has_flops = any(segment.flops for segment in self.segments)
        amounts = [(segment.runner, segment.flops if has_flops else segment.nodes) for segment in self.segments]
        ours = sum(amount for runner, amount in amounts if runner is Runner.ORT)
        return ours, sum(amount for _, amount in amounts)

    @property
    def set_up_seconds(self) -> float:
        """What all phases of start-up work took so far."""
        return sum(self.timings.values())

    @property
    def fallbacks(self) -> list[Fallback]:
        """What PyTorch runs, most frequent first."""
        return [
            Fallback(op, reason, count, detail, self._places[op, reason, detail])
            for (op, reason, detail), count in self._fallbacks.most_common()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole record as plain data, for JSON."""
        return {
            "versions": dict(self.versions),
            "features": [
                {"name": f.name, "state": f.state.value, "reason": f.reason, "effect": f.effect}
                for f in self.features.values()
            ],
            "segments": [
                {"graph": s.graph, "runner": s.runner.value, "nodes": s.nodes, "ops": dict(s.ops), "flops": s.flops}
                for s in self.segments
            ],
            "fallbacks": [
                {"op": f.op, "reason": f.reason.value, "count": f.count, "detail": f.detail, "where": f.where}
                for f in self.fallbacks
            ],
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
