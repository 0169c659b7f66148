"""The record of features, fallbacks, segments and measurements of a model. `observe/` renders it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol, TypeAlias

from ort_accel.reporting.batches import Inspection, LoadBalance
from ort_accel.reporting.fallbacks import Fallback, Fallbacks, Reason
from ort_accel.reporting.memory import GraphMemory, MeasuredPeak
from ort_accel.reporting.segments import COVERAGE, Kernels, Runner, Segment
from ort_accel.reporting.series import Series
from ort_accel.reporting.timings import Race, StepComparison


class State(StrEnum):
    """The state of a feature."""

    APPLIED = "applied"
    REFUSED = "refused"
    OFF = "off"


@dataclass(frozen=True)
class Feature:
    """One feature: applied with an effect, refused for a reason, or off."""

    name: str
    state: State
    reason: str = ""
    effect: str = ""


class Watcher(Protocol):
    """A listener that is told when phases of start-up work begin and end."""

    def begin(self, phase: str, graph: str) -> None:
        """A phase of start-up work begins, on a graph or, with an empty name, on no graph in particular."""

    def end(self) -> None:
        """The innermost phase ends."""


_FallbackKind: TypeAlias = tuple[str, Reason, str, bool]
"""The operator, reason and detail of a fallback, and whether a session calls it."""


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
