"""Large values of a backward are made late and freed early; graphs without recomputation stay as they are."""

from __future__ import annotations

from math import inf

import pytest
import torch

import ort_accel
from ort_accel.cli.benchmark.workload import Workload, batch_of, build
from ort_accel.graph.meta_keys import OUTLIVES_GRAPH, RUNS_AFTER
from ort_accel.partition import delay_large_values
from ort_accel.partition.assign import Refusal
from ort_accel.partition.placement import by_rule, place
from ort_accel.partition.segments import cut
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.memory import GraphMemory
from tests.partition.test_segments import graph_of
from tests.recompute.models import ALIKE, ALL_ROWS, NAMES, assert_same_bits, one_step, plain, recorded
from tests.tiers import mostly_long

aten = torch.ops.aten

IN_PYTORCH = {aten.cos.default, aten.tanh.default}
RECOMPUTED = aten.exp.default
"""The operator that is recomputed in these graphs: it waits for another segment."""

X, WEIGHT = torch.ones(1 << 9, 1 << 9), torch.ones(1 << 9, 1 << 9)
SMALL = torch.ones(2, 2)


def cuts_of(function, *inputs, is_recomputed=True):
    """Returns the names of the operators in each segment, before and after."""
    graph = graph_of(function, *inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta[OUTLIVES_GRAPH] = True
        if is_recomputed and node.target is RECOMPUTED:
            node.meta[RUNS_AFTER] = tuple(item.name for item in graph.nodes if item.target is aten.cos.default)
    decide = by_rule(lambda node: Refusal(Reason.WISH) if node.target in IN_PYTORCH else None)
    assignment = place(graph, [decide])
    before = cut(graph, assignment)
    after = delay_large_values.delay_large_values(before, assignment.free)
    return [[[node.name for node in item.nodes] for item in cuts] for cuts in (before, after)]


def waiting(x, weight):
    """A large product that is read after a recomputation."""
    given = x.tanh()
    return (given @ weight) * given.cos().exp().tanh() + given


def test_a_large_value_is_computed_right_before_its_reader():
    before, after = cuts_of(waiting, X, WEIGHT)
    assert before == [["tanh", "cos"], ["mm", "exp"], ["tanh_1"], ["mul", "add"]]
    assert after == [["tanh", "cos"], ["exp"], ["tanh_1"], ["mm"], ["mul"], ["add"]]


def test_a_value_whose_inputs_would_live_longer_does_not_wait():
    def not_read_later(x, weight):
        given = x.tanh()
        return (given @ weight) * given.cos().exp().tanh()

    before, after = cuts_of(not_read_later, X, WEIGHT)
    assert before == after == [["tanh", "cos"], ["mm", "exp"], ["tanh_1"], ["mul"]]


def test_no_value_waits_past_a_write():
    def written(x, weight):
        given = x.tanh()
        early, again = given @ weight, given.cos().exp()
        weight.copy_(again)
        return early * again.tanh() + given

    before, after = cuts_of(written, X, WEIGHT.clone())
    assert after[:3] == before[:3] == [["tanh", "cos"], ["mm", "exp", "copy_"], ["tanh_1"]]


@pytest.mark.parametrize(
    ("inputs", "is_recomputed"), [((SMALL, SMALL), True), ((X, WEIGHT), False)], ids=["small", "kept"]
)
def test_small_values_and_graphs_without_recomputation_stay(inputs, is_recomputed):
    before, after = cuts_of(waiting, *inputs, is_recomputed=is_recomputed)
    assert before == after


def test_a_value_read_at_the_end_of_a_segment_leaves_it():
    """A recomputed value, and the gradient of a weight that reads it."""

    def read_at_the_end(x, weight):
        again = x.cos().exp()
        return again.sin() @ weight, again.tanh()

    before, after = cuts_of(read_at_the_end, X, WEIGHT)
    assert before == [["cos"], ["exp", "sin", "mm"], ["tanh"]]
    assert after == [["cos"], ["exp", "sin"], ["mm"], ["tanh"]]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight: ((again := x.cos().exp()).sin() @ weight, again.sinh(), again.tanh()),
        lambda x, weight: ((again := x.cos().exp()).sin() @ again.sinh(), again.tanh()),
        lambda x, weight: (((again := x.cos().exp()).sin() @ weight).abs(), again.tanh()),
        lambda x, weight: ((inner := (again := x.cos().exp()).sin()) @ weight, inner.tanh(), again.tanh()),
    ],
    ids=["more comes behind", "not the only one", "read in it", "read elsewhere"],
)
def test_a_segment_stays_whole(function):
    before, after = cuts_of(function, X, WEIGHT)
    assert before == after


STATS = {"observe": {"log_level": "error", "memory_stats": True}}


def predicted(memory: GraphMemory) -> int:
    """Returns the bytes of a step beside those that live all the time."""
    return memory.frontier[-1].bytes - memory.frontier[-1].resident


@pytest.mark.parametrize("name", mostly_long(NAMES, "bert"))
def test_a_step_takes_no_more_memory_and_changes_no_bit(name, monkeypatch):
    monkeypatch.setattr(delay_large_values, "LARGE_BYTES", inf)
    together = one_step(name, {"level": 1}, rows=64, **STATS)
    monkeypatch.setattr(delay_large_values, "LARGE_BYTES", 0)
    delayed = one_step(name, {"level": 1}, rows=64, **STATS)
    assert delayed[1].repeated
    assert_same_bits(delayed[0], together[0])
    assert_same_bits(delayed[0], plain(name, rows=64)[0])
    assert predicted(delayed[1]) <= predicted(together[1])


@pytest.mark.long
def test_a_bert_takes_less(monkeypatch):
    """Hidden values of feed-forward layers are a third of the peak."""
    size = Workload("bert", hidden=96, layers=2, heads=2, batch=32, length=64, vocab=64, dropout=0.0)
    found = []
    for large in (inf, 1 << 16):
        monkeypatch.setattr(delay_large_values, "LARGE_BYTES", large)
        config = ALIKE | STATS | ALL_ROWS | {"memory": {"level": 1}}
        model = ort_accel.accelerate(build(size), config | {"compute": config["compute"] | {"native": False}})
        model(**batch_of(size)).loss.backward()
        found.append(predicted(recorded(model)))
    assert found[1] < 0.9 * found[0]
