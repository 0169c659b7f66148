"""A segment goes over to generated code once that is there and faster."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ort_accel.executor.ort_segment import OrtSegment
from ort_accel.generated import takeover, trial
from ort_accel.generated.takeover import COMPILING, FEATURE, NONE_COMPILED, Kept
from ort_accel.generated.trial import (
    CLUSTERS,
    NONE_BEFORE,
    NONE_FASTER,
    OPERATORS,
    PROGRAM,
    TRYING,
    Candidate,
    WatchedSegment,
)
from ort_accel.graph_cache.pickling import dumped, loaded
from ort_accel.native.library import native_library
from ort_accel.reporting.report import State
from ort_accel.reporting.timings import KERNELS_AWAITED, KERNELS_READY, KERNELS_TRIED
from tests.generated.watched import MANY, Clock, Compiler, Watched, files, function, wait

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")


def test_a_segment_runs_as_compiled_until_its_kernels_are_there(
    compiler: Compiler, kernels_win: None, runs: list[str]
) -> None:
    compiler.may_go_on.clear()
    watched = Watched()
    for _ in range(5):
        watched()
    assert runs == [OPERATORS] * 5
    assert watched.report.features[FEATURE].reason == COMPILING
    compiler.may_go_on.set()
    wait()
    runs.clear()
    for _ in range(MANY + 5):
        watched()
    assert runs == [CLUSTERS, OPERATORS] * (MANY // 2) + [CLUSTERS] * 5
    assert compiler.requests == [list(compiler.kernels)]
    assert compiler.calls == 3 * (MANY // 2 + 5)


def test_the_report_says_what_went_over(compiler: Compiler, clock: Clock) -> None:
    clock.seconds = lambda way, run: 0.5 if way == CLUSTERS else 2.0
    watched = Watched()
    watched.runs()
    (race,) = watched.report.races
    assert (race.graph, race.subject, race.chosen) == ("forward 0 part 0", "generated code", CLUSTERS)
    assert race.seconds == {OPERATORS: 2.0, CLUSTERS: 0.5}
    assert race.count == 5 + 2
    feature = watched.report.features[FEATURE]
    assert (feature.state, feature.effect.split()[3]) == (State.APPLIED, "7")
    assert watched.report.counters[KERNELS_READY] == watched.report.counters[KERNELS_TRIED] == 1


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        (lambda way, run: 0.98 if way == CLUSTERS else 1.0, CLUSTERS),
        (lambda way, run: 1.0, OPERATORS),
        (lambda way, run: 0.995 if way == CLUSTERS else 1.0, OPERATORS),
        (lambda way, run: 2.0 if way == CLUSTERS else 1.0, OPERATORS),
        (lambda way, run: (99.0 if run == 0 else 0.5) if way == CLUSTERS else 1.0, CLUSTERS),
        (lambda way, run: (1.4 if run in (0, 2, 5, 6) else 0.5) if way == CLUSTERS else 1.0, CLUSTERS),
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
    assert (watched.report.features[FEATURE].state is State.APPLIED) is (chosen == CLUSTERS)


@pytest.mark.parametrize(("cost", "chosen"), [(0.8, CLUSTERS), (1.2, OPERATORS)])
def test_runs_of_different_sizes_are_compared_by_their_size(
    cost: float, chosen: str, compiler: Compiler, clock: Clock
) -> None:
    """Kernels happen to get batches that are ten times as large."""
    clock.seconds = lambda way, run: 10 * cost if way == CLUSTERS else 1.0
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
    assert runs == [OPERATORS] * 4, "they count as no turn"
    watched.runs()
    assert watched.report.races
    runs.clear()
    watched(rows=31)
    watched(rows=12)
    assert runs == [OPERATORS, CLUSTERS]


def test_a_size_of_one_runs_as_compiled(compiler: Compiler, kernels_win: None, runs: list[str]) -> None:
    """Inductor writes kernels for sizes from 2 on."""
    watched = Watched()
    watched.runs()
    runs.clear()
    watched(rows=1)
    watched(columns=1)
    watched(rows=2, columns=2)
    assert runs == [OPERATORS, OPERATORS, CLUSTERS]
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
    assert race.chosen == (OPERATORS if during == "trial" else CLUSTERS)


def test_equal_clusters_of_waiting_segments_are_compiled_once(compiler: Compiler, kernels_win: None) -> None:
    first = Watched(delay_seconds={CLUSTERS: 10.0})
    second = Watched(generator=first.generator, report=first.report)
    third = Watched(lambda x, y: (x * y).cos(), generator=first.generator, report=first.report)
    third.generator.ran(10.0, CLUSTERS)
    wait()
    assert [len(names) for names in compiler.requests] == [4]
    for watched in (first, second, third):
        for _ in range(MANY):
            watched()
    assert [race.count for race in first.report.races] == [7, 7, 2]


def test_compiling_begins_after_the_delay(compiler: Compiler, clock: Clock) -> None:
    clock.seconds = lambda way, run: 3.0
    watched = Watched(delay_seconds={CLUSTERS: 10.0})
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


def test_steps_in_eager_mode_count_for_the_delay(compiler: Compiler, clock: Clock) -> None:
    clock.seconds = lambda way, run: 3.0
    watched = Watched(delay_seconds={CLUSTERS: 10.0, PROGRAM: 20.0})
    watched()
    watched.generator.trained(6.9)
    wait()
    assert not compiler.requests
    watched.generator.trained(0.2)
    wait()
    assert len(compiler.requests) == 1
    for _ in range(MANY):
        watched()
    watched.generator.trained(19.0)
    wait()
    assert len(compiler.requests) == 1
    watched.generator.trained(2.0)
    wait()
    assert len(compiler.requests) == 2


def test_segments_that_kernels_cannot_make_much_faster_are_left_out(
    compiler: Compiler, clock: Clock, runs: list[str]
) -> None:
    clock.seconds = lambda way, run: 1000.0
    watched = Watched(least_share=0.01)
    watched.runs()
    assert not compiler.requests
    assert set(runs) == {OPERATORS}
    assert watched.report.features[FEATURE].state is State.OFF
    assert watched.report.features[FEATURE].reason != COMPILING


def test_a_segment_is_not_left_out_for_one_slow_run(compiler: Compiler, clock: Clock) -> None:
    clock.seconds = lambda way, run: 1e-6 if run == 1 else 1000.0
    watched = Watched(least_share=0.01, delay_seconds={CLUSTERS: 2000.0})
    for _ in range(3):
        watched()
    wait()
    assert len(compiler.requests) == 1


def test_clusters_contain_only_given_operators(compiler: Compiler) -> None:
    Watched(operators=frozenset({"aten.sin.default", "aten.mul.Tensor"})).runs(0)
    (cluster,) = compiler.clusters.values()
    assert [str(node.target) for node in cluster.nodes] == ["aten.sin.default", "aten.mul.Tensor"]


def test_without_kernels_a_segment_goes_on_as_compiled(compiler: Compiler, runs: list[str]) -> None:
    compiler.error = RuntimeError("no room\nand a second line")
    watched = Watched()
    watched.runs()
    assert set(runs) == {OPERATORS}
    assert watched.report.notes == ["no kernels were generated: RuntimeError: no room"]
    assert watched.report.features[FEATURE].state is State.OFF
    assert "notes" in watched.report.features[FEATURE].reason
    assert len(compiler.requests) == 1


def test_a_segment_whose_kernels_fit_no_session_keeps_none_from_others(
    compiler: Compiler, kernels_win: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Watched(delay_seconds={CLUSTERS: 10.0})
    second = Watched(lambda x, y: (x * y).cos(), generator=first.generator, report=first.report)
    create = OrtSegment.with_model

    def refuse(segment: OrtSegment, *args: Any) -> OrtSegment:
        if segment is first.segment:
            raise RuntimeError("no more room for models")
        return create(segment, *args)

    monkeypatch.setattr(OrtSegment, "with_model", refuse)
    first.generator.ran(10.0, CLUSTERS)
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
    assert runs == [CLUSTERS] * 3
    assert not compiler.requests
    assert not second.report.races
    assert second.report.features[FEATURE].state is State.APPLIED
    assert not second.report.notes


def test_the_next_start_does_not_compile_again_what_was_slower(
    compiler: Compiler, clock: Clock, runs: list[str], tmp_path: Path
) -> None:
    clock.seconds = lambda way, run: 2.0 if way == CLUSTERS else 1.0
    Watched(folder=tmp_path).runs()
    assert len(files(tmp_path)) == 1
    compiler.requests.clear()
    runs.clear()
    Watched(folder=tmp_path).runs()
    assert set(runs) == {OPERATORS}
    assert not compiler.requests


def test_nothing_is_kept_before_it_is_decided(compiler: Compiler, kernels_win: None, tmp_path: Path) -> None:
    Watched(folder=tmp_path).runs(MANY - 1)
    assert not files(tmp_path)
    compiler.requests.clear()
    Watched(folder=tmp_path).runs()
    assert len(compiler.requests) == 1
    assert files(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"no pickle",
        pickle.dumps("something else"),
        dumped(Kept((CLUSTERS,), CLUSTERS, b"no segment", kernels=["a"]), {}),
    ],
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
    assert runs == [CLUSTERS]
    assert not third.report.notes


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: {"operators": frozenset({"aten.sin.default", "aten.mul.Tensor", "aten.exp.default"})},
        lambda patch: patch.setattr(takeover, "build_version", lambda: "another torch") or {},
        lambda patch: patch.setattr(takeover, "get_num_threads", lambda: 7) or {},
        lambda patch: {"run": lambda x, y: function(x, y) * 0.25},
    ],
    ids=["operators", "version", "threads", "segment"],
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
    assert isinstance(restored, WatchedSegment)
    watched.run = restored
    runs.clear()
    watched()
    assert runs == [CLUSTERS]


def test_a_generator_belongs_to_one_process() -> None:
    with pytest.raises(TypeError, match="belongs to one process"):
        pickle.dumps(Watched().generator)


@pytest.mark.parametrize("condition", ["True", "s4 >= 2 and (s77 <= 40)", "(u3 // 2 == 4)"])
def test_a_condition_gets_the_symbols_that_it_names(condition: str) -> None:
    guarded = trial._Guarded(None, Candidate(CLUSTERS, None, condition, 1))  # type: ignore[arg-type]
    assert guarded.holds({"s4": 2, "s77": 40, "u3": 9, "s1": 0}) is True
    assert guarded.holds({"s4": 1, "s77": 41, "u3": 10, "s1": 0}) is (condition == "True")


def test_segments_wait_on_where_no_thread_can_be_started(
    compiler: Compiler, kernels_win: None, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        watched()
        assert watched.report.counters[KERNELS_AWAITED] == 1
    watched.runs(MANY + 2)
    assert runs[-1] == CLUSTERS
    assert watched.report.counters[KERNELS_AWAITED] == 0
    assert watched.report.notes == []


def test_the_report_says_why_no_segment_uses_kernels(compiler: Compiler, clock: Clock) -> None:
    clock.seconds = lambda way, run: 2.0 if way == CLUSTERS else 1.0
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


def test_a_kept_graph_tries_no_kernels(compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path) -> None:
    """The first start ended before its kernels were tried, and a kept graph has no nodes to find clusters in."""
    watched = Watched(folder=tmp_path)
    known = {"generator": watched.generator, "sessions": watched.generator._sessions}
    watched.run = loaded(dumped(watched.run, known), known)
    watched.runs()
    assert set(runs) == {OPERATORS}


def test_the_next_start_tries_again_what_the_compiler_failed_at(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path
) -> None:
    compiler.compiler_error = "CppCompileError: No space left on device"
    first = Watched(delay_seconds={CLUSTERS: 0.0, PROGRAM: 0.0}, folder=tmp_path)
    first.runs()
    assert first.report.features[FEATURE].reason == NONE_COMPILED
    assert first.report.notes == [f"generated code could not be compiled: {compiler.compiler_error}"]
    assert not files(tmp_path)
    compiler.compiler_error = ""
    Watched(delay_seconds={CLUSTERS: 0.0}, folder=tmp_path).runs(MANY + 2)
    assert runs[-1] == CLUSTERS


def test_a_start_that_has_nothing_left_to_try_says_so(compiler: Compiler, clock: Clock, tmp_path: Path) -> None:
    clock.seconds = lambda way, run: {OPERATORS: 1.0, CLUSTERS: 2.0}[way]
    Watched(folder=tmp_path).runs(MANY + 2)
    assert Watched(folder=tmp_path).report.features[FEATURE].reason == NONE_BEFORE
