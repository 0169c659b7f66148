"""A whole graph goes over to Inductor's program once that is there and faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ort_accel.executor.ort_segment import OrtSegment
from ort_accel.generated import trial
from ort_accel.generated.trial import CLUSTERS, OPERATORS, PROGRAM
from ort_accel.graph_cache.pickling import dumped, loaded
from ort_accel.native.library import native_library
from ort_accel.reporting.segments import Runner
from ort_accel.reporting.timings import KERNELS_READY, KERNELS_TRIED
from tests.generated.watched import MANY, PROGRAMS, Clock, Compiler, Watched, files

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")

BOTH = {CLUSTERS: 0.0, PROGRAM: 0.0}


@pytest.mark.parametrize(
    ("seconds", "went_on"),
    [
        ({OPERATORS: 4.0, CLUSTERS: 2.0, PROGRAM: 1.0}, PROGRAM),
        ({OPERATORS: 4.0, CLUSTERS: 5.0, PROGRAM: 1.0}, PROGRAM),
        ({OPERATORS: 4.0, CLUSTERS: 2.0, PROGRAM: 3.0}, CLUSTERS),
        ({OPERATORS: 4.0, CLUSTERS: 5.0, PROGRAM: 6.0}, OPERATORS),
    ],
)
def test_the_fastest_of_three_ways_goes_on(
    seconds: dict[str, float], went_on: str, compiler: Compiler, clock: Clock, runs: list[str]
) -> None:
    clock.seconds = lambda way, run: seconds[way]
    watched = Watched(delay_seconds=BOTH)
    watched.runs()
    watched.runs(MANY + 1)
    runs.clear()
    for _ in range(3):
        watched()
    assert set(runs) == {went_on}
    assert len(watched.report.races) == 2
    best = min(seconds[OPERATORS], seconds[CLUSTERS])
    assert set(watched.report.races[1].seconds.values()) == {best, seconds[PROGRAM]}
    counters = watched.report.counters
    assert counters[KERNELS_READY] == counters[KERNELS_TRIED] == 2
    assert (counters["nodes in generated kernels"] > 0) is (went_on == CLUSTERS)
    assert (counters["nodes in programs of Inductor"] > 0) is (went_on == PROGRAM)
    assert watched.segment.record.runner is (Runner.INDUCTOR if went_on == PROGRAM else Runner.ORT)


def test_a_program_waits_for_its_own_delay(compiler: Compiler, clock: Clock) -> None:
    watched = Watched(delay_seconds={PROGRAM: 10.0})
    watched.runs(8)
    assert not compiler.requests
    watched.runs(1)
    assert len(compiler.requests) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("list(run(*arguments))", "[each + 0.001 for each in run(*arguments)]"), "its result 0 is off by 1.0e-03"),
        (("list(run(*arguments))", "[each * math.nan for each in run(*arguments)]"), "other infinities or NaN"),
        (("list(run(*arguments))", "[each.double() for each in run(*arguments)]"), "has another type or shape"),
        (("list(run(*arguments))", "arguments[-1:]"), "has another type or shape"),
        (("list(run(*arguments))", "math.no_such_function()"), "AttributeError: module 'math' has no"),
    ],
)
def test_a_program_that_is_wrong_does_not_go_on(
    change: tuple[str, str], said: str, compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path
) -> None:
    compiler.program_text = compiler.program_text.replace(*change)
    watched = Watched(delay_seconds={PROGRAM: 0.0}, folder=tmp_path)
    watched.runs()
    assert runs.count(PROGRAM) == 1
    assert runs[-1] == OPERATORS
    (note,) = watched.report.notes
    assert note.startswith("a program of Inductor is not used for forward 0 part 0: ")
    assert said in note
    assert not watched.report.races
    counters = watched.report.counters
    assert counters[KERNELS_READY] == counters[KERNELS_TRIED] == 1
    runs.clear()
    Watched(delay_seconds={PROGRAM: 0.0}, folder=tmp_path).runs()
    assert set(runs) == {OPERATORS}, "it is not tried again"
    assert len(compiler.requests) == 1


def test_a_result_of_a_program_has_memory_of_its_own(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor may return an input, or the same memory twice, and a session may write over its inputs."""
    call = OrtSegment.__call__

    def write_over(segment: OrtSegment, tensors: list[Tensor], symbols: dict[str, int]) -> Any:
        given = list(tensors)
        results = call(segment, tensors, symbols)
        for tensor in given:
            tensor.zero_()
        return results

    monkeypatch.setattr(OrtSegment, "__call__", write_over)
    compiler.program_text = compiler.program_text.replace("list(run(*arguments))", "arguments[-2:-1]")
    options: dict[str, Any] = {"delay_seconds": {PROGRAM: 0.0}, "folder": tmp_path}
    first = Watched(lambda x, y: x * 1 + y * 0, **options)
    first.runs(MANY + 2)
    second = Watched(lambda x, y: x * 1 + y * 0, **options)
    for watched in (first, second):
        given, result = watched()
        assert runs[-1] == PROGRAM
        assert result.data_ptr() not in [each.data_ptr() for each in given]


def test_a_program_is_not_compared_where_memory_is_short(
    compiler: Compiler, kernels_win: None, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "available_bytes", lambda: 100)
    watched = Watched(delay_seconds={PROGRAM: 0.0})
    watched.runs()
    assert set(runs) == {OPERATORS}
    assert "memory does not suffice" in watched.report.notes[0]


def test_a_program_that_fails_later_is_left(compiler: Compiler, kernels_win: None, runs: list[str]) -> None:
    compiler.program_text = compiler.program_text.replace(
        "return list", "assert len(PROGRAMS) < 30, 'out of range'\n    return list"
    )
    del PROGRAMS[:]
    watched = Watched(delay_seconds={PROGRAM: 0.0})
    watched.runs(40)
    assert len(PROGRAMS) == 30
    assert runs[-1] == OPERATORS
    assert watched.segment.record.runner is Runner.ORT


def test_a_graph_that_inductor_cannot_compile_runs_as_compiled(
    compiler: Compiler, kernels_win: None, runs: list[str]
) -> None:
    compiler.program_error = "LoweringException: no such operator"
    watched = Watched(delay_seconds={PROGRAM: 0.0})
    watched.runs()
    assert set(runs) == {OPERATORS}
    assert watched.report.notes == [
        "Inductor compiles no program for forward 0 part 0: LoweringException: no such operator"
    ]


def test_the_next_start_runs_a_kept_program_at_once(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path
) -> None:
    first = Watched(delay_seconds=BOTH, folder=tmp_path)
    first.runs()
    first.runs(MANY + 1)
    runs.clear()
    compiler.requests.clear()
    second = Watched(delay_seconds=BOTH, folder=tmp_path)
    second.runs(3)
    assert set(runs) == {PROGRAM}
    assert not compiler.requests
    assert second.report.counters["nodes in programs of Inductor"] > 0


def test_the_next_start_tries_what_the_first_one_did_not(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path
) -> None:
    Watched(delay_seconds=BOTH, folder=tmp_path).runs()
    runs.clear()
    second = Watched(delay_seconds=BOTH, folder=tmp_path)
    second.runs(MANY + 2)
    assert set(runs[:1]) == {CLUSTERS}
    assert runs[-1] == PROGRAM
    assert [len(race.seconds) for race in second.report.races] == [2]
    assert set(second.report.races[0].seconds) == {CLUSTERS, PROGRAM}


def test_a_program_gets_tensors_in_the_order_of_memory_that_it_expects(
    compiler: Compiler, kernels_win: None, runs: list[str]
) -> None:
    compiler.program_text = compiler.program_text.replace(
        "return list", "assert all(each.stride() == (each.shape[1], 1) for each in arguments[-2:])\n    return list"
    )
    watched = Watched(delay_seconds={PROGRAM: 0.0})
    watched.runs(MANY + 2)
    assert runs[-1] == PROGRAM
    watched.is_transposed = True
    watched()
    assert runs[-1] == PROGRAM


def test_a_kept_graph_tries_a_program(compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path) -> None:
    """The first start ended before anything was tried."""
    watched = Watched(delay_seconds=BOTH, folder=tmp_path)
    known = {"generator": watched.generator, "sessions": watched.generator._sessions}
    watched.run = loaded(dumped(watched.run, known), known)
    watched.runs(MANY + 2)
    assert runs[-1] == PROGRAM
    assert len(compiler.requests) == 1
    assert len(files(tmp_path)) == 1
