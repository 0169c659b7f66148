"""By default, cheap operators are recomputed."""

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

import ort_accel
from ort_accel.cli.benchmark.workload import Workload, batch_of, build
from ort_accel.reporting.report import State
from tests.against_eager import assert_step_as_eager, step
from tests.recompute.models import ALIKE, assert_same_bits, recorded
from tests.tiers import mostly_long


def workload(name):
    return Workload(name, hidden=64, layers=2, heads=2, batch=8, length=64, vocab=64, dropout=0.1)


def level_state(model):
    return ort_accel.report(model).features["memory.level"].state


@pytest.mark.parametrize(
    ("name", "share"), mostly_long([("bert", 0.85), ("gpt2", 0.8), ("llama", 0.8)], ("llama", 0.8))
)
def test_cheap_recompute_saves_memory_and_changes_no_bit(name, share):
    model, batch = build(workload(name)), batch_of(workload(name))
    models = [ort_accel.accelerate(copy.deepcopy(model), ALIKE | {"memory": {"level": level}}) for level in ("auto", 0)]
    cheap, plain = [step(each, **batch) for each in models]
    assert_same_bits(cheap, plain)
    assert recorded(models[0]).stash < share * recorded(models[1]).stash == share * recorded(models[0]).stash_without
    assert not recorded(models[1]).repeated
    assert [level_state(each) for each in models] == [State.APPLIED, State.OFF]


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    mostly_long(product(["bert", "gpt2", "llama"], [False, True]), ("gpt2", False), ("bert", True)),
)
def test_gradients_are_those_of_eager_with_measured_placement(name, checkpointing):
    size = replace(workload(name), checkpointing=checkpointing)
    model = build(size)
    accelerated = ort_accel.accelerate(copy.deepcopy(model), {"observe": {"log_level": "error"}})
    assert_step_as_eager(model, accelerated, **batch_of(size))
    assert recorded(accelerated).repeated


def test_cheap_recompute_is_off_if_the_user_gives_plans():
    model = ort_accel.accelerate(build(workload("bert")), ALIKE | {"memory": {"plans": ["BiasGelu+:1:1"]}})
    step(model, **batch_of(workload("bert")))
    assert recorded(model).repeated == 1


def test_casts_of_weights_for_autocast_are_saved():
    model = ort_accel.accelerate(build(workload("bert")), ALIKE)
    with torch.autocast("cpu", torch.bfloat16):
        step(model, **batch_of(workload("bert")))
    rows = {row.cluster: row for row in recorded(model).plans}
    assert rows["Cast+"].applied == 0 < rows["BiasGelu+"].applied
