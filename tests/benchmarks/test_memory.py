"""The memory benchmark runs the same steps in every way, and says what they take."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("memory_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return module


@pytest.mark.long
def test_every_way_makes_the_same_step_and_says_what_it_takes(script):
    workload = replace(script.CASES["small"], **script.SMALLER | {"layers": 3})
    ways = [
        script.Way("eager"),
        script.Way("eager, checkpointing"),
        script.Way("ort_accel, budget 0.9", {"budget": 0.9}),
    ]
    eager, checkpointing, ours = (script.measure(way, workload, 1, 1) for way in ways)
    assert checkpointing.loss == pytest.approx(eager.loss, rel=1e-4)
    assert ours.loss == pytest.approx(eager.loss, rel=1e-4)
    assert eager.before == ours.before > 0
    assert ours.predicted <= ours.budget
    assert ours.in_use > 0
    assert "predicted" in script._line(ways[2].name, ours)
    assert "predicted" not in script._line(ways[0].name, eager)
    said = list(script.compared({"eager": eager, ways[1].name: replace(checkpointing, in_use=2**40), "ours": ours}))
    assert len(said) == 2
    assert said[0].startswith("within the peak of eager with checkpointing")


def test_a_peak_to_stay_within_is_a_budget_with_early_updates(script):
    workload = replace(script.CASES["small"], **script.SMALLER)
    free = script.measure(script.Way("free", {"budget": 1.0}, steps_early=True), workload, 0, 1)
    found = script.measure(script.within(free.predicted), workload, 0, 1)
    assert found.predicted <= found.budget == pytest.approx(0.98 * free.predicted, abs=1024)


@pytest.mark.long
def test_a_budget_that_cannot_be_kept_is_shown_as_such(script):
    workload = replace(script.CASES["small"], **script.SMALLER)
    way = script.Way("ort_accel, budget 0.1", {"budget": 0.1})
    assert "the smallest budget that can be kept" in script._line(way.name, script.measure(way, workload, 1, 1))


def test_the_largest_batch_takes_no_more_than_eager_does(script, monkeypatch):
    bench = script.Bench(replace(script.CASES["small"], batch=8), 1, 1)
    monkeypatch.setattr(bench, "_alone", lambda way, workload, steps: script.Figures(in_use=5 + 10 * workload.batch))
    bench.found = {"eager": script.Figures(in_use=299), "ours": script.Figures(in_use=85)}
    bench.find_largest(script.Way("ours"))
    assert bench.largest == {"ours": 29}


def test_a_budget_below_a_refused_one_is_not_tried(script, monkeypatch):
    bench = script.Bench(script.CASES["small"], 1, 1)
    tried = []
    refused = script.Figures(refused="the smallest budget that can be kept is 0.7")
    monkeypatch.setattr(bench, "_alone", lambda way, *_: tried.append(way.budget) or refused)
    for share in (0.6, 0.5):
        bench.run(script.Way(f"budget {share}", {"budget": share}))
    assert tried == [0.6]
    assert bench.found["budget 0.5"] is refused
