"""A segment goes over to generated kernels while a model trains, and gives eager's losses, gradients and draws."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import ort_accel
from ort_accel.compiler import generated_kernels
from ort_accel.errors import ConfigError
from ort_accel.executor.build_model import build
from ort_accel.executor.ort_segment import Fallback, OrtSegment
from ort_accel.generated import builds, clusters, takeover
from ort_accel.generated.builds import why_no_compiler
from ort_accel.generated.clusters import Cluster
from ort_accel.generated.takeover import (
    COMPILING,
    FEATURE,
    NONE_FASTER,
    TRYING,
    WITH,
    WITHOUT,
    Candidate,
    Generator,
    Kept,
)
from ort_accel.generated.worker import Outcome
from ort_accel.graph.symbolic_sizes import SymbolSource
from ort_accel.graph_cache.pickling import dumped, loaded
from ort_accel.native.library import native_library
from ort_accel.reporting import KERNELS_READY, KERNELS_TRIED, Report, State
from ort_accel.runtime import signed_files
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions
from tests.against_eager import assert_same, pair, report, step
from tests.executor.one_session import OPSET
from tests.forked import asked
from tests.generated.python_kernels import PythonKernel
from tests.generated.traced import Traced, normal
from tests.tiers import mostly_long

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")
needs_compiler = pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler())

THREAD = "ort_accel kernels"
MANY = 2 * (takeover.TRIED_RUNS + 1)
"""Runs after which it is decided which way goes on."""


def wait() -> None:
    """Returns when nothing is being compiled any more."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()


def way_of(segment: OrtSegment) -> str:
    return WITH if b"cluster_" in segment._session_arguments[1] else WITHOUT


def spy(patch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that notes who runs a segment, for each run: generated kernels or operators alone."""
    ran: list[str] = []
    call = OrtSegment.__call__

    def spied(segment: OrtSegment, *args: Any) -> Any:
        ran.append(way_of(segment))
        return call(segment, *args)

    patch.setattr(OrtSegment, "__call__", spied)
    return ran


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who ran a segment, for each run."""
    return spy(monkeypatch)


@pytest.fixture
def kernels_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels go on, however long they take."""
    monkeypatch.setattr(takeover, "LEAST_GAIN", float("inf"))
    monkeypatch.setattr(Outcome, "is_faster", property(lambda outcome: not outcome.error))


class Compiler:
    """Stands for the process that compiles: makes kernels in Python."""

    def __init__(self) -> None:
        self.kernels: dict[str, PythonKernel] = {}
        self.clusters: dict[str, Cluster] = {}
        self.requests: list[list[str]] = []
        self.conditions: list[str] = []
        self.error: Exception | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, found: Mapping[str, Cluster], sources: Path | None) -> tuple[bytes, dict[str, Outcome]]:
        assert self.may_go_on.wait(60)
        self.requests.append(list(found))
        if self.error is not None:
            raise self.error
        self.clusters |= found
        self.kernels |= {name: PythonKernel(name, cluster) for name, cluster in found.items()}
        return b"a library", {name: Outcome("", self._conditions(each), 2.0, 1.0) for name, each in found.items()}

    def _conditions(self, cluster: Cluster) -> list[str]:
        return [text for text in self.conditions if set(re.findall(r"s\d", text)) <= set(cluster.hints)]

    @property
    def calls(self) -> int:
        return sum(len(kernel.calls) for kernel in self.kernels.values())


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Kernels are in Python, and clusters count that save nothing."""
    found = Compiler()
    monkeypatch.setattr(takeover, "compile_clusters", found)
    monkeypatch.setattr(takeover, "load_kernels", lambda library, names: None)
    monkeypatch.setattr(clusters, "MIN_SAVED_BYTES", -(1 << 40))
    yield found
    found.may_go_on.set()
    wait()


class Clock:
    """Time passes only while segments run: for as long as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds: Callable[[str, int], float] = lambda way, run: 1.0
        self.counts = {WITH: 0, WITHOUT: 0}

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found, call = Clock(), OrtSegment.__call__

    def timed(segment: OrtSegment, *args: Any) -> Any:
        way = way_of(segment)
        found.now += found.seconds(way, found.counts[way])
        found.counts[way] += 1
        return call(segment, *args)

    monkeypatch.setattr(takeover, "time", found)
    monkeypatch.setattr(OrtSegment, "__call__", timed)
    return found


def function(x: Tensor, y: Tensor) -> Tensor:
    return torch.mm((x.sin() * y).exp(), y.t() * 0.5 + 1).tanh() * 2


def no(_: object) -> bool:
    return False


def fail(*_: object) -> Any:
    pytest.fail("it ran in PyTorch")


class Watched:
    """A function as a segment that goes over to generated kernels."""

    def __init__(self, run: Callable[..., Tensor] = function, **options: Any) -> None:
        self.function = run
        self.traced = Traced(run, (normal(12, 8), normal(12, 8)), "symbolic")
        self.report = options.pop("report", None) or Report()
        sessions = Sessions(SessionSettings(threads=2))
        self.generator = options.pop("generator", None) or Generator(sessions, OPSET, self.report, **options)
        graph = self.traced.segment
        model = build(graph.body, graph.wanted, OPSET, graph.called)
        self.segment = OrtSegment(model, sessions, no, Fallback(fail, no), "test")
        self.run = self.generator.watch(self.segment, graph, no, "forward 0 part 0")
        given = self.traced.graph.find_nodes(op="placeholder")
        named = {node.name: position for position, node in enumerate(given)}
        self._positions = [named[node.name] for node in model.given]
        self._symbols = SymbolSource()
        for position, node in enumerate(given):
            self._symbols.learn(position, node.meta["val"])

    def __call__(self, rows: int = 12, columns: int = 8) -> None:
        """Runs it once, and compares the result with PyTorch's."""
        args = normal(rows, columns), normal(rows, columns) + 1
        symbols: dict[str, int] = {}
        self._symbols.read(args, symbols)
        (found,) = self.run([args[at] for at in self._positions], symbols)
        torch.testing.assert_close(found, self.function(*args))

    def runs(self, count: int = MANY) -> None:
        """Compiles the kernels, and runs it some times."""
        self()
        wait()
        for _ in range(count):
            self()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*.{takeover.SUFFIX}"))


def test_a_segment_runs_as_compiled_until_its_kernels_are_there(
    compiler: Compiler, kernels_win: None, runs: list[str]
) -> None:
    compiler.may_go_on.clear()
    watched = Watched()
    for _ in range(5):
        watched()
    assert runs == [WITHOUT] * 5
    assert watched.report.features[FEATURE].reason == COMPILING
    compiler.may_go_on.set()
    wait()
    runs.clear()
    for _ in range(MANY + 5):
        watched()
    assert runs == [WITH, WITHOUT] * (MANY // 2) + [WITH] * 5
    assert compiler.requests == [list(compiler.kernels)]
    assert compiler.calls == 3 * (MANY // 2 + 5)


def test_the_report_says_what_went_over(compiler: Compiler, clock: Clock) -> None:
    clock.seconds = lambda way, run: 0.5 if way == WITH else 2.0
    watched = Watched()
    watched.runs()
    (race,) = watched.report.races
    assert (race.graph, race.subject, race.chosen) == ("forward 0 part 0", "generated kernels", WITH)
    assert race.seconds == {WITHOUT: 2.0, WITH: 0.5}
    assert race.count == 5 + 2
    feature = watched.report.features[FEATURE]
    assert (feature.state, feature.effect.split()[3]) == (State.APPLIED, "7")
    assert watched.report.counters[KERNELS_READY] == watched.report.counters[KERNELS_TRIED] == 1


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        (lambda way, run: 0.98 if way == WITH else 1.0, WITH),
        (lambda way, run: 1.0, WITHOUT),
        (lambda way, run: 0.995 if way == WITH else 1.0, WITHOUT),
        (lambda way, run: 2.0 if way == WITH else 1.0, WITHOUT),
        (lambda way, run: (99.0 if run == 0 else 0.5) if way == WITH else 1.0, WITH),
        (lambda way, run: (1.4 if run in (0, 2, 5, 6) else 0.5) if way == WITH else 1.0, WITH),
    ],
    ids=["faster", "equal", "hardly faster", "slower", "slow once, at first", "slow at first and three times later"],
)
def test_the_faster_way_goes_on(
    seconds: Callable[[str, int], float], chosen: str, compiler: Compiler, clock: Clock, runs: list[str]
) -> None:
    clock.seconds = seconds
    watched = Watched()
    watched.runs()
    runs.clear()
    for _ in range(4):
        watched()
    assert set(runs) == {chosen}
    assert watched.report.races[0].chosen == chosen
    assert (watched.report.features[FEATURE].state is State.APPLIED) is (chosen == WITH)


@pytest.mark.parametrize(("cost", "chosen"), [(0.8, WITH), (1.2, WITHOUT)])
def test_runs_of_different_sizes_are_compared_by_their_size(
    cost: float, chosen: str, compiler: Compiler, clock: Clock
) -> None:
    """Kernels happen to get batches that are ten times as large."""
    clock.seconds = lambda way, run: 10 * cost if way == WITH else 1.0
    watched = Watched()
    watched()
    wait()
    for at in range(MANY):
        watched(rows=6 if at % 2 else 60)
    assert watched.report.races[0].chosen == chosen


@pytest.mark.parametrize("conditions", [["s0 <= 20", "s1 <= 999"], ["s0 % 2 == 0"]])
def test_where_a_condition_does_not_hold_the_segment_runs_as_compiled(
    conditions: list[str], compiler: Compiler, kernels_win: None, runs: list[str]
) -> None:
    compiler.conditions = conditions
    watched = Watched()
    watched()
    wait()
    runs.clear()
    for _ in range(4):
        watched(rows=31)
    assert runs == [WITHOUT] * 4, "they count as no turn"
    watched.runs()
    assert watched.report.races
    runs.clear()
    watched(rows=31)
    watched(rows=12)
    assert runs == [WITHOUT, WITH]


def test_a_size_of_one_runs_as_compiled(compiler: Compiler, kernels_win: None, runs: list[str]) -> None:
    """Inductor writes kernels for sizes from 2 on."""
    watched = Watched()
    watched.runs()
    runs.clear()
    watched(rows=1)
    watched(columns=1)
    watched(rows=2, columns=2)
    assert runs == [WITHOUT, WITHOUT, WITH]
    assert all(size > 1 for kernel in compiler.kernels.values() for call in kernel.calls for size in call)


@pytest.mark.parametrize("during", ["trial", "later"])
def test_after_an_error_of_a_kernel_the_segment_runs_as_compiled(
    during: str, compiler: Compiler, kernels_win: None
) -> None:
    watched = Watched()
    watched()
    wait()
    if during == "later":
        watched.runs()
        watched()
    for kernel in compiler.kernels.values():
        kernel.fails = True
    watched()
    before = compiler.calls
    for _ in range(MANY):
        watched()
    assert compiler.calls == before, "it is not tried again"
    (race,) = watched.report.races
    assert race.chosen == (WITHOUT if during == "trial" else WITH)


def test_equal_clusters_of_waiting_segments_are_compiled_once(compiler: Compiler, kernels_win: None) -> None:
    first = Watched(delay_seconds=10.0)
    second = Watched(generator=first.generator, report=first.report)
    third = Watched(lambda x, y: (x * y).cos(), generator=first.generator, report=first.report)
    third.generator.ran(10.0)
    wait()
    assert [len(names) for names in compiler.requests] == [4]
    for watched in (first, second, third):
        for _ in range(MANY):
            watched()
    assert [race.count for race in first.report.races] == [7, 7, 2]


def test_compiling_begins_after_the_delay(compiler: Compiler, clock: Clock) -> None:
    clock.seconds = lambda way, run: 3.0
    watched = Watched(delay_seconds=10.0)
    for _ in range(3):
        watched()
    wait()
    assert not compiler.requests
    watched()
    wait()
    assert len(compiler.requests) == 1
    for _ in range(MANY):
        watched()
    wait()
    assert len(compiler.requests) == 1


def test_segments_that_kernels_cannot_make_much_faster_are_left_out(
    compiler: Compiler, clock: Clock, runs: list[str]
) -> None:
    clock.seconds = lambda way, run: 1000.0
    watched = Watched(least_share=0.01)
    watched.runs()
    assert not compiler.requests
    assert set(runs) == {WITHOUT}
    assert watched.report.features[FEATURE].state is State.OFF
    assert watched.report.features[FEATURE].reason != COMPILING


def test_clusters_contain_only_given_operators(compiler: Compiler) -> None:
    Watched(operators=frozenset({"aten.sin.default", "aten.mul.Tensor"})).runs(0)
    (cluster,) = compiler.clusters.values()
    assert [str(node.target) for node in cluster.nodes] == ["aten.sin.default", "aten.mul.Tensor"]


def test_without_kernels_a_segment_goes_on_as_compiled(compiler: Compiler, runs: list[str]) -> None:
    compiler.error = RuntimeError("no room\nand a second line")
    watched = Watched()
    watched.runs()
    assert set(runs) == {WITHOUT}
    assert watched.report.notes == ["no kernels were generated: RuntimeError: no room"]
    assert watched.report.features[FEATURE].state is State.OFF
    assert "notes" in watched.report.features[FEATURE].reason
    assert len(compiler.requests) == 1


def test_a_segment_whose_kernels_fit_no_session_keeps_none_from_others(
    compiler: Compiler, kernels_win: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Watched(delay_seconds=10.0)
    second = Watched(lambda x, y: (x * y).cos(), generator=first.generator, report=first.report)
    create = OrtSegment.with_model

    def refuse(segment: OrtSegment, *args: Any) -> OrtSegment:
        if segment is first.segment:
            raise RuntimeError("no more room for models")
        return create(segment, *args)

    monkeypatch.setattr(OrtSegment, "with_model", refuse)
    first.generator.ran(10.0)
    wait()
    for watched in (first, second):
        for _ in range(MANY):
            watched()
    assert [race.count for race in first.report.races] == [2]
    assert len(first.report.notes) == 1
    assert "no more room for models" in first.report.notes[0]


def test_the_next_start_uses_kept_kernels_at_once(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path
) -> None:
    Watched(folder=tmp_path).runs()
    assert len(files(tmp_path)) == 1
    compiler.requests.clear()
    runs.clear()
    second = Watched(folder=tmp_path)
    for _ in range(3):
        second()
    wait()
    assert runs == [WITH] * 3
    assert not compiler.requests
    assert not second.report.races
    assert second.report.features[FEATURE].state is State.APPLIED
    assert not second.report.notes


def test_the_next_start_does_not_compile_again_what_was_slower(
    compiler: Compiler, clock: Clock, runs: list[str], tmp_path: Path
) -> None:
    clock.seconds = lambda way, run: 2.0 if way == WITH else 1.0
    Watched(folder=tmp_path).runs()
    assert len(files(tmp_path)) == 1
    compiler.requests.clear()
    runs.clear()
    Watched(folder=tmp_path).runs()
    assert set(runs) == {WITHOUT}
    assert not compiler.requests


def test_nothing_is_kept_before_it_is_decided(compiler: Compiler, kernels_win: None, tmp_path: Path) -> None:
    Watched(folder=tmp_path).runs(MANY - 1)
    assert not files(tmp_path)
    compiler.requests.clear()
    Watched(folder=tmp_path).runs()
    assert len(compiler.requests) == 1
    assert files(tmp_path)


@pytest.mark.parametrize(
    "content", [b"no pickle", pickle.dumps("something else"), dumped(Kept(b"", ["a"], "True", 1), {})]
)
def test_kept_kernels_that_cannot_be_used_are_made_again(
    content: bytes, compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path
) -> None:
    first = Watched(folder=tmp_path)
    assert first.generator._files is not None
    first.generator._files.put(first.generator._key(first.segment), content)
    second = Watched(folder=tmp_path)
    second.runs()
    assert len(compiler.requests) == 1
    assert second.report.races
    assert len([note for note in second.report.notes if "made again" in note]) == 1
    runs.clear()
    third = Watched(folder=tmp_path)
    third()
    assert runs == [WITH]
    assert not third.report.notes


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: {"operators": frozenset({"aten.sin.default", "aten.mul.Tensor", "aten.exp.default"})},
        lambda patch: patch.setattr(takeover, "build_version", lambda: "another torch") or {},
        lambda patch: {"run": lambda x, y: function(x, y) * 0.25},
    ],
    ids=["operators", "version", "segment"],
)
def test_what_decides_about_kernels_leads_to_other_files(
    change: Callable[[pytest.MonkeyPatch], dict[str, Any]],
    compiler: Compiler,
    kernels_win: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Watched(folder=tmp_path).runs()
    Watched(folder=tmp_path, **change(monkeypatch)).runs()
    assert len(compiler.requests) == 2
    assert len(files(tmp_path)) == 2


def test_a_kept_graph_takes_kept_kernels(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path
) -> None:
    """A graph that is kept for the next start names the generator."""
    watched = Watched(folder=tmp_path)
    known = {"generator": watched.generator, "sessions": watched.generator._sessions}
    content = dumped(watched.run, known)
    watched.runs()
    restored = loaded(content, known)
    assert isinstance(restored, takeover.WatchedSegment)
    watched.run = restored
    runs.clear()
    watched()
    assert runs == [WITH]


def test_a_generator_belongs_to_one_process() -> None:
    with pytest.raises(TypeError, match="belongs to one process"):
        pickle.dumps(Watched().generator)


@pytest.mark.parametrize("condition", ["True", "s4 >= 2 and (s77 <= 40)", "(u3 // 2 == 4)"])
def test_a_condition_gets_the_symbols_that_it_names(condition: str) -> None:
    guarded = takeover._Guarded(None, Candidate(None, condition, 1))  # type: ignore[arg-type]
    assert guarded.holds({"s4": 2, "s77": 40, "u3": 9, "s1": 0}) is True
    assert guarded.holds({"s4": 1, "s77": 41, "u3": 10, "s1": 0}) is (condition == "True")


def test_the_report_says_why_no_segment_uses_kernels(compiler: Compiler, clock: Clock) -> None:
    clock.seconds = lambda way, run: 2.0 if way == WITH else 1.0
    watched = Watched()

    def said() -> str:
        return watched.report.features[FEATURE].reason

    compiler.may_go_on.clear()
    watched()
    assert said() == COMPILING
    compiler.may_go_on.set()
    wait()
    assert said() == TRYING
    for _ in range(MANY):
        watched()
    assert said() == NONE_FASTER


def test_a_kept_graph_without_kept_kernels_runs_as_compiled(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path
) -> None:
    """The first start ended before its kernels were tried, and a kept graph has no nodes to write others for."""
    watched = Watched(folder=tmp_path)
    known = {"generator": watched.generator, "sessions": watched.generator._sessions}
    watched.run = loaded(dumped(watched.run, known), known)
    watched.runs()
    assert set(runs) == {WITHOUT}


class Model(nn.Module):
    """Chains of element-wise operators, which read and write a MiB each at 256 rows, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.drop = nn.Linear(32, width), nn.Linear(width, 4), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        inner = self.drop(inner.sin() * torch.sigmoid(inner) + inner.cos())
        return self.last(inner).tanh().square().mean()


def config(folder: Path | None = None, generated: Mapping[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    """Kernels are generated at once, for graphs whose sizes are all open."""
    engine = {"compare_with_eager": False, "dynamic_shapes": True, "cache_dir": folder and str(folder), **engine}
    return {"version": 1, "compute": {"generated": {"enabled": True, **(generated or {})}}, "engine": engine}


class Training:
    """Steps of a model, each compared with the same step in eager mode."""

    def __init__(
        self, settings: Any, model: nn.Module, batch: Callable[[int], Tensor] = lambda rows: normal(rows, 32)
    ) -> None:
        self.eager, self.ours = pair(model, settings)
        self.report = report(self.ours)
        self.steps, self._batch = 0, batch

    def __call__(self, *rows: int) -> None:
        for count in rows:
            self.steps += 1
            x = self._batch(count)
            assert_same(step(self.ours, x, seed=self.steps), step(self.eager, x, seed=self.steps))

    def until_decided(self, *rows: int) -> None:
        """Compiles the kernels of forward and backward, and trains until it is decided what goes on."""
        self(*rows)
        wait()
        self(*(rows[at % len(rows)] for at in range(MANY)))

    @property
    def feature(self) -> Any:
        return self.report.features[FEATURE]

    @property
    def said(self) -> list[str]:
        """The notes about kernels."""
        return [note for note in self.report.notes if "kernels" in note]


def choices(training: Training) -> dict[str, str]:
    """Returns what was chosen for the forward and the backward."""
    return {race.graph.split()[0]: race.chosen for race in training.report.races}


ROWS = (6, 9, 14)


def test_training_goes_on_while_kernels_are_compiled(compiler: Compiler, kernels_win: None, runs: list[str]) -> None:
    compiler.may_go_on.clear()
    training = Training(config(), Model(16))
    training(*ROWS)
    assert set(runs) == {WITHOUT}
    assert training.feature.reason == COMPILING
    compiler.may_go_on.set()
    training.until_decided(*ROWS)
    assert choices(training) == {"forward": WITH, "backward": WITH}
    runs.clear()
    training(*ROWS)
    assert set(runs) == {WITH}
    assert "compute.generated.enabled" in str(training.report)
    assert training.feature.state is State.APPLIED
    nodes = sum(race.count for race in training.report.races)
    assert training.feature.effect.startswith(f"generated kernels compute {nodes} nodes")


class OfAnInput(nn.Module):
    """A chain of operators that read the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.last = nn.Parameter(torch.randn(32)), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.sin() * self.weight).exp() * x).tanh().mean()


BATCHES: dict[str, Callable[[int], Tensor]] = {
    "with gaps between rows": lambda rows: normal(rows, 32 + rows)[:, 3:35],
    "of every other row": lambda rows: normal(2 * rows, 32)[::2],
    "from the third row on": lambda rows: normal(rows + 2, 32)[2:],
    "transposed": lambda rows: normal(32, rows).t(),
    "of equal rows": lambda rows: normal(1, 32).expand(rows, 32),
}


@pytest.mark.parametrize("name", mostly_long(BATCHES, "with gaps between rows", "of equal rows"))
def test_a_batch_may_lie_in_memory_in_any_way(
    name: str, compiler: Compiler, kernels_win: None, runs: list[str]
) -> None:
    training = Training(config(), OfAnInput(), BATCHES[name])
    training.until_decided(*ROWS)
    runs.clear()
    training(*ROWS)
    assert runs == [WITH, WITH] * len(ROWS)


def test_sizes_of_one_train_as_in_eager_mode(compiler: Compiler, kernels_win: None) -> None:
    training = Training(config(), Model(16))
    training.until_decided(*ROWS)
    training(1, 2, 1, 6)


def test_an_error_of_all_kernels_stops_no_training(compiler: Compiler, kernels_win: None) -> None:
    training = Training(config(), Model(16))
    training.until_decided(*ROWS)
    for kernel in compiler.kernels.values():
        kernel.fails = True
    training(*ROWS)
    before = compiler.calls
    training(*ROWS)
    assert compiler.calls == before


def test_evaluations_use_no_generated_kernels_of_the_training(compiler: Compiler, kernels_win: None) -> None:
    training = Training(config(), Model(16))
    training.until_decided(*ROWS)
    for model in (training.eager, training.ours):
        model.eval()
    x = normal(9, 32)
    with torch.no_grad():
        torch.testing.assert_close(training.ours(x), training.eager(x))


def test_a_second_start_compiles_nothing_and_uses_kept_kernels_in_its_first_step(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path
) -> None:
    Training(config(tmp_path), Model(16)).until_decided(*ROWS)
    assert len(files(tmp_path)) == 2
    compiler.requests.clear()
    for remove in ("nothing", "*.graph"):
        for path in tmp_path.glob(remove):
            path.unlink()
        runs.clear()
        second = Training(config(tmp_path), Model(16))
        second(*ROWS)
        wait()
        assert set(runs) == {WITH}, remove
        assert not compiler.requests
        assert not second.report.races
        assert second.feature.state is State.APPLIED


def test_a_start_without_a_compiler_trains_with_what_is_kept(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Training(config(tmp_path, {"enabled": "auto"}), Model(16))(*ROWS)
    monkeypatch.setattr(generated_kernels, "why_no_compiler", lambda: "there is no C++ compiler; install g++")
    second = Training(config(tmp_path, {"enabled": "auto"}), Model(16))
    second(*ROWS)
    assert second.feature.state is State.OFF
    assert second.feature.reason == "there is no C++ compiler; install g++"


def test_a_folder_that_cannot_be_written_to_leaves_a_run_that_trains(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(signed_files, "write_aside", refuse)
    training = Training(config(tmp_path), Model(16))
    training.until_decided(*ROWS)
    assert training.feature.state is State.APPLIED
    runs.clear()
    training(*ROWS)
    assert set(runs) == {WITH}
    notes = [note for note in training.report.notes if "Read-only file system" in note]
    assert len(notes) == 1
    assert not files(tmp_path)


@needs_compiler
def test_a_process_that_is_killed_leaves_a_run_that_trains(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "MIN_SAVED_BYTES", -(1 << 40))
    start, killed = subprocess.Popen, []

    def kill(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        process.kill()
        killed.append(process)
        return process

    monkeypatch.setattr(builds.subprocess, "Popen", kill)
    training = Training(config(), Model(16))
    training.until_decided(*ROWS)
    assert killed
    assert set(runs) == {WITHOUT}
    assert training.said == ["no kernels were generated: NoKernels: the compiling process ended with -9: no words"]
    assert training.feature.state is State.OFF


@needs_compiler
def test_a_compiler_that_fails_leaves_a_run_that_trains(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "MIN_SAVED_BYTES", -(1 << 40))
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho no room for code >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    training = Training(config(tmp_path), Model(16))
    training.until_decided(*ROWS)
    assert set(runs) == {WITHOUT}
    (note,) = training.said
    assert note.startswith("no kernels were generated: NoKernels: the compiling process ended with 1: ")
    assert str(broken) in note
    assert not files(tmp_path), "it is tried again by the next start"


def test_steps_that_must_give_the_same_bits_use_no_generated_kernels(compiler: Compiler, runs: list[str]) -> None:
    training = Training(config(generated={"enabled": "auto"}, deterministic=True), Model(16))
    training(*ROWS)
    assert set(runs) == {WITHOUT}
    assert (training.feature.state, training.feature.reason) == (State.OFF, "steps must give the same bits")


OFF = {
    "deterministic": ({"engine": {"deterministic": True}}, "times decide which kernels run"),
    "native": ({"compute": {"native": False, "generated": {"enabled": True}}}, "sessions call these kernels"),
}


@pytest.mark.parametrize("name", OFF)
def test_who_asks_for_kernels_that_cannot_be_generated_is_told_so(name: str) -> None:
    other, reason = OFF[name]
    with pytest.raises(ConfigError, match=f"compute.generated.enabled: {reason}.*; write auto or false"):
        ort_accel.accelerate(Model(16), {**config(), **other})


def test_without_a_compiler_kernels_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"there is no C\+\+ compiler; install g\+\+; write auto or false"):
        ort_accel.accelerate(Model(16), config())
    training = Training(config(generated={"enabled": "auto"}), Model(16))
    training(*ROWS)
    assert training.feature.reason == "there is no C++ compiler; install g++"


def test_a_file_says_which_operators_kernels_may_contain(compiler: Compiler, tmp_path: Path) -> None:
    names = ["aten.sin.default", "aten.cos", "aten.mul.Tensor", "aten.add.Tensor"]
    (tmp_path / "operators.json").write_text(json.dumps(names))
    Training(config(generated={"ops_file": str(tmp_path / "operators.json")}), Model(16))(*ROWS)
    wait()
    assert compiler.clusters
    found = {str(node.target) for cluster in compiler.clusters.values() for node in cluster.nodes}
    assert {"aten.sin.default", "aten.mul.Tensor"} <= found <= set(names)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("[aten.sin", "Expecting value"),
        ('{"aten.sin.default": true}', r'must be a list of operators, such as \["aten.mul.Tensor"\]'),
        ("[1]", "must be a list of operators"),
        ('["aten.sin.default", "aten.sinn.default"]', "PyTorch has no aten.sinn.default"),
    ],
    ids=["missing", "no JSON", "no list", "no names", "unknown operator"],
)
def test_a_file_of_operators_that_cannot_be_used_is_an_error(content: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "operators.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"(?s)compute.generated.ops_file.*{said}"):
        ort_accel.accelerate(Model(16), config(generated={"ops_file": str(file)}))


REAL_ROWS = (256, 77, 130)


@dataclass(frozen=True)
class Start:
    """What a start in a process of its own gave, whose kernels Inductor wrote."""

    first: list[str]
    """Who ran the segments at first: until kernels were there, or in one step."""
    later: list[str]
    """Who ran them in the last steps."""
    choices: dict[str, str]
    state: State
    said: list[str]
    commands: list[list[str]]
    """Those of processes that compile."""


def first_start(results: Any, folder: Path) -> None:
    """A start without kept kernels."""
    results.put(started(folder, is_first=True))


def next_start(results: Any, folder: Path) -> None:
    """A start that finds what the first one has kept."""
    results.put(started(folder, is_first=False))


def started(folder: Path, is_first: bool) -> Start | str:
    """Trains, and compares each step's loss, gradients and draws with eager mode's. Returns an error's text."""
    commands: list[list[str]] = []
    start = subprocess.Popen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda command, **rest: commands.append(command) or start(command, **rest))
        patch.setattr(takeover, "LEAST_GAIN", float("inf"))
        patch.setattr(Outcome, "is_faster", property(lambda outcome: not outcome.error))
        ran = spy(patch)
        try:
            engine = {"save_onnx": str(folder / "models")}
            training = Training(config(folder / "cache", {"debug": True}, **engine), Model(1024))
            training(REAL_ROWS[0])
            first = list(ran)
            if is_first:
                training.until_decided(*REAL_ROWS)
            ran.clear()
            training(*REAL_ROWS)
        except Exception:
            return traceback.format_exc()
        compiled = [command for command in commands if "ort_accel.generated.worker" in command]
        return Start(first, ran, choices(training), training.feature.state, training.said, compiled)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which starts keep kernels, and their C++ for people."""
    if why_no_compiler():
        pytest.skip(why_no_compiler())
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def real(folder: Path) -> Start:
    """The first start."""
    found = asked(first_start, folder)
    assert isinstance(found, Start), found
    return found


def test_compiled_kernels_take_over_and_each_step_is_eagers(real: Start) -> None:
    assert set(real.first) == {WITHOUT}
    assert real.later == [WITH, WITH] * len(REAL_ROWS)
    assert real.choices == {"forward": WITH, "backward": WITH}
    assert real.state is State.APPLIED
    assert not real.said
    assert len(real.commands) == 1, "forward and backward are compiled together"


def test_sources_are_kept_beside_saved_models(real: Start, folder: Path) -> None:
    models = folder / "models"
    (library,) = models.glob("*.cpp")
    modules = sorted(models.glob("*.py"))
    assert library.stem in [path.stem for path in modules]
    assert all(f'extern "C" int64_t {path.stem}(' in library.read_text() for path in modules)
    assert any("aten.sin.default" in path.read_text() for path in modules)
    assert list(models.glob("*.onnx"))


def test_a_second_process_compiles_nothing_and_calls_kernels_in_its_first_step(real: Start, folder: Path) -> None:
    assert asked(next_start, folder) == Start([WITH, WITH], real.later, {}, State.APPLIED, [], [])


ENDS_SOON = """
import subprocess
from ort_accel.generated import clusters
from tests.generated.test_takeover import Model, Training, config

def sleep(command, start=subprocess.Popen, **rest):
    process = start(["sleep", "600"], **rest)
    print(process.pid, flush=True)
    return process

clusters.MIN_SAVED_BYTES = 0
subprocess.Popen = sleep
Training(config(), Model(16))(6, 9)
print("the end")
"""


@pytest.mark.long
def test_a_training_that_ends_while_kernels_are_compiled_leaves_no_process() -> None:
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_SOON],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        cwd=root,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    pid, end = ended.stdout.split(maxsplit=1)
    assert end.strip() == "the end"
    for _ in range(300):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.1)
                continue
        return
    os.kill(int(pid), signal.SIGKILL)
    pytest.fail("it is still there")
