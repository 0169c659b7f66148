"""Times are taken in turns and within a limit; what was found is kept, and a bad file is made anew."""

from __future__ import annotations

import json

import pytest

from ort_accel.autotune.timer import ROUNDS, SavedTimings, Stopwatch
from ort_accel.reporting.report import Report


class Clock:
    """Time that passes only when something is run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float):
        """A run that takes so long, one after the other and then always the last."""
        remaining = list(seconds)

        def run() -> None:
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return run


def test_the_shortest_time_counts_and_the_first_run_does_not():
    clock = Clock()
    seconds = Stopwatch(clock=clock).race({"a": clock.taking(0.5, 3.0, 2.0), "b": clock.taking(9.0, 1.0)})
    assert seconds == {"a": 2.0, "b": 1.0}


def test_runs_take_turns():
    clock, order = Clock(), []
    Stopwatch(clock=clock).race({name: lambda name=name: order.append(name) for name in "ab"}, in_a_row=2)
    assert "".join(order) == "aabb" * (1 + ROUNDS)


def test_all_races_together_stay_within_the_limit():
    clock = Clock()
    stopwatch = Stopwatch(limit=10.0, clock=clock)
    assert stopwatch.race({"a": clock.taking(1.0)}) == {"a": 1.0}
    assert clock.now == 1 + ROUNDS
    assert stopwatch.left == pytest.approx(10.0 - clock.now)
    assert stopwatch.race({"a": clock.taking(1.5)}) is None
    assert clock.now <= 10.0


def test_a_race_that_does_not_come_to_every_runner_has_no_result():
    clock = Clock()
    stopwatch = Stopwatch(limit=10.0, clock=clock)
    assert stopwatch.race({"a": clock.taking(4.0), "b": clock.taking(4.0)}) is None


def test_a_share_of_the_time_bounds_one_race():
    clock = Clock()
    Stopwatch(limit=100.0, clock=clock).race({"a": clock.taking(2.0)}, share=0.1)
    assert clock.now <= 10.0


FOUND = {"seconds": {"a": 1.5, "b": 0.5}}


def kept(path, context="here", report=None):
    return SavedTimings(path, context, report or Report())


def test_results_are_found_again_by_what_was_measured_and_where(tmp_path):
    path = tmp_path / "deep" / "tuning.json"
    results = kept(path)
    results.put(FOUND, "kind", "mm")
    results.save()
    assert kept(path).get("kind", "mm") == FOUND
    assert kept(path).get("kind", "bmm") is None
    assert kept(path, "on another machine").get("kind", "mm") is None


def test_processes_that_share_a_file_keep_each_others_results(tmp_path):
    path = tmp_path / "tuning.json"
    one, other = kept(path), kept(path)
    one.put(FOUND, "one")
    other.put(FOUND, "other")
    one.save()
    other.save()
    assert kept(path).get("one") == kept(path).get("other") == FOUND


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format": "of something else", "entries": {}}',
        b'{"format": "ort_accel tuning 1"}',
        b'{"format": "ort_accel tuning 1", "entries": {"a": {"seconds": {"a": "fast"}}}}',
        b'{"format": "ort_accel tuning 1", "entries": {"a": {}}}',
    ],
)
def test_a_damaged_file_is_reported_and_made_again(tmp_path, content):
    path, report = tmp_path / "tuning.json", Report()
    path.write_bytes(content)
    results = kept(path, report=report)
    assert results.get("kind") is None
    assert [note for note in report.notes if f"{path} is damaged" in note]
    results.put(FOUND, "kind")
    results.save()
    assert kept(path).get("kind") == FOUND


def test_a_folder_that_cannot_be_written_costs_only_the_results(tmp_path):
    (tmp_path / "file").write_text("")
    report = Report()
    results = kept(tmp_path / "file" / "tuning.json", report=report)
    results.put(FOUND, "kind")
    results.save()
    assert results.get("kind") == FOUND
    assert any("cannot write" in note for note in report.notes)


def test_without_a_file_results_last_as_long_as_the_process():
    results = kept(None)
    results.put(FOUND, "kind")
    results.save()
    assert results.get("kind") == FOUND


def test_the_file_is_readable_by_people(tmp_path):
    results = kept(tmp_path / "tuning.json")
    results.put(FOUND, "kind")
    results.save()
    content = json.loads((tmp_path / "tuning.json").read_text())
    assert list(content["entries"].values()) == [FOUND]
