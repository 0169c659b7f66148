"""A budget limits the peak of a step and changes no gradient; a smaller one recomputes more."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

import ort_accel
from ort_accel.cli.benchmark.workload import batch_of, build
from ort_accel.errors import OrtAccelError
from ort_accel.recompute import budget, planner
from tests.against_eager import step
from tests.recompute.models import ALIKE, NAMES, assert_same_bits, one_step, plain, recorded, size
from tests.tiers import mostly_long

ROWS = 16
"""Enough that saved values outweigh the parameters."""

LAYERS = 3
"""One layer is live at the peak under every plan."""


@cache
def within(name, limit):
    return one_step(name, {"budget": limit}, ROWS, layers=LAYERS)


@pytest.mark.parametrize("name", mostly_long(NAMES, "bert"))
def test_a_budget_is_kept_and_changes_no_bit(name):
    trace, memory = within(name, 0.9)
    without, *_, chosen = memory.frontier
    assert_same_bits(trace, plain(name, rows=ROWS, layers=LAYERS)[0])
    assert chosen.bytes <= 0.9 * without.bytes
    assert memory.repeated
    assert memory.stash < memory.stash_without


def test_a_smaller_budget_recomputes_all_that_a_larger_one_does(monkeypatch):
    seen = []

    def noted(share, frontiers):
        seen.append(budget.fit_budget(share, frontiers))
        return seen[-1]

    monkeypatch.setattr(planner, "fit_budget", noted)
    memory = one_step("gpt2", {"budget": 0.7}, ROWS)[1]
    [points] = seen
    assert [point.step.peak_bytes for point in points] == [peak.bytes for peak in memory.frontier]
    chosen = [budget.fit_budget(share / 100, [iter(points)])[-1] for share in range(100, 69, -5)]
    for larger, smaller in pairwise(chosen):
        assert larger.chosen.recomputed <= smaller.chosen.recomputed
        assert larger.cost_ms <= smaller.cost_ms
        assert smaller.step.peak_bytes <= larger.step.peak_bytes
    assert len({point.step.peak_bytes for point in chosen}) > 2


def test_a_budget_above_the_peak_recomputes_nothing():
    memory = within("bert", "1GiB")[1]
    assert memory.repeated == 0
    assert len(memory.frontier) == 1


def test_an_infeasible_budget_names_the_smallest_one():
    with pytest.raises(OrtAccelError, match="the smallest budget that can be kept is") as error:
        within("bert", 0.1)
    smallest = float(str(error.value).partition("can be kept is ")[2].partition(";")[0])
    assert within("bert", smallest)[1].frontier[-1].bytes <= smallest * within("bert", "1GiB")[1].frontier[0].bytes


def test_the_predicted_peak_includes_parameters_and_optimizer_states():
    memory = within("bert", "1GiB")[1]
    peak = memory.frontier[0]
    assert peak.bytes - peak.resident > memory.stash
    assert peak.resident > 3 * 4 * 32 * 64, "the word embedding alone with its two moments"


@pytest.mark.parametrize("early", mostly_long([False, True], True), ids=["at the end", "early"])
def test_a_budget_can_save_what_a_level_can(early):
    """A budget also works if the backward reads most saved values, the logits, at once."""
    workload = replace(size("llama", ROWS), vocab=4096)
    memory = {"early_gradient_release": early}
    optimizer = {"name": "adamw_ort_fused", "step_in_backward": early}

    def peak_of(wish):
        stats = {"log_level": "error", "memory_stats": True}
        model = ort_accel.accelerate(
            build(workload), ALIKE | {"memory": memory | wish, "optimizer": optimizer, "observe": stats}
        )
        step(model, **batch_of(workload))
        return recorded(model).frontier[-1].bytes

    limit = peak_of({"level": 1})
    assert peak_of({"budget": f"{-(-limit // 1024)}KiB"}) <= limit
