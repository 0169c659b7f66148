"""Plans, levels and checkpointing save memory and change no gradient."""

import copy
import json
import logging
from itertools import product

import pytest
import sympy
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ort_accel
from ort_accel.errors import OrtAccelError
from tests.against_eager import assert_step_as_eager, pair, step
from tests.recompute.models import ALL_ROWS, NAMES, accelerated, assert_same_bits, model_and_batch, one_step, plain
from tests.tiers import mostly_long


def plans_of(name):
    """Return the plans of a model. They depend on earlier tests: dynamic sizes change the names of clusters."""
    return one_step(name, {"level": 0})[1].plans


def row(memory, cluster):
    return next(row for row in memory.plans if row.cluster == cluster)


@pytest.mark.parametrize(("name", "level"), mostly_long([*((name, 1) for name in NAMES), ("bert", 2)], ("bert", 1)))
def test_levels_save_memory_and_change_no_bit(name, level):
    trace, memory = one_step(name, {"level": level})
    assert_same_bits(trace, plain(name)[0])
    assert memory.layers == {"t5": 6}.get(name, 2)
    assert memory.repeated
    assert memory.stash < 0.6 * plain(name)[1].stash == 0.6 * memory.stash_without


@pytest.mark.parametrize("name", mostly_long(NAMES, "bert"))
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_plans_change_no_bit(name, data):
    rows = plans_of(name)
    drawn = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=6, unique_by=lambda row: row.cluster))
    plans = [f"{row.cluster}:{row.kind}:{data.draw(st.sampled_from([-1, 1, row.frequency]))}" for row in drawn]
    trace, memory = one_step(name, {"level": 0, "plans": plans})
    assert_same_bits(trace, plain(name)[0])
    assert memory.stash < memory.stash_without


def test_a_plan_covers_all_places():
    trace, memory = one_step("bert", {"level": 0, "plans": ["BiasGelu+:1:-1"]}, **ALL_ROWS)
    gelu = row(memory, "BiasGelu+")
    assert (gelu.requested, gelu.applied, gelu.frequency) == (-1, 2, 2)
    assert memory.stash_without - memory.stash == gelu.saving == 2 * 4 * 2 * 16 * 128
    assert_same_bits(trace, plain("bert", all_rows=True)[0])


def test_a_plan_covers_exactly_one_place():
    memory = one_step("bert", {"level": 0, "plans": ["BiasGelu+:1:1"]}, **ALL_ROWS)[1]
    assert row(memory, "BiasGelu+").applied == memory.repeated == 1
    assert memory.stash_without - memory.stash == row(memory, "BiasGelu+").saving / 2


def test_a_plan_file_may_hold_hundreds_of_plans(tmp_path):
    rows = plans_of("bert")
    texts = [f"{row.cluster}:{row.kind}:-1" for row in rows] * 40
    file = tmp_path / "plans.json"
    file.write_text(json.dumps(texts))
    trace, memory = one_step("bert", {"level": 0, "plan_file": str(file)})
    assert all(row.applied == row.frequency for row in memory.plans)
    assert_same_bits(trace, plain("bert")[0])


def test_an_advanced_search_finds_more_clusters():
    basic = {row.cluster for row in one_step("bert", {"level": 0, "probe": "0:0"}, **ALL_ROWS)[1].plans}
    advanced = {row.cluster for row in plain("bert", all_rows=True)[1].plans}
    assert "BiasGelu+" in basic < advanced
    assert "Where+MatMul+BiasSoftmax+" in advanced - basic


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("BiasGelo+:1:-1", ["nearest first: BiasGelu+", "LayerNormalization+"]),
        ("BiasGelu+:1:3", ["asks for 3 places, and the model has 2", "BiasGelu+:1:2"]),
        ("BiasGelu+:2:-1", ["of type 1 only, not 2"]),
    ],
)
def test_a_plan_without_a_match_lists_the_clusters(plan, words):
    with pytest.raises(OrtAccelError) as error:
        one_step("bert", {"level": 0, "plans": [plan]})
    assert all(word in str(error.value) for word in words)


@pytest.mark.long
def test_savings_are_expressions_of_dynamic_sizes():
    memory = one_step("bert", {"level": 0}, engine={"dynamic_shapes": True}, **ALL_ROWS)[1]
    saving = sympy.sympify(row(memory, "BiasGelu+").symbolic)
    assert {memory.symbols[str(symbol)] for symbol in saving.free_symbols} == {2, 16}
    assert saving.subs(memory.symbols) == row(memory, "BiasGelu+").saving


@pytest.mark.long
def test_other_lengths_compile_nothing():
    eager, ours = pair(model_and_batch("bert")[0], {"memory": {"level": 1}, "observe": {"log_level": "error"}})
    batch = model_and_batch("bert")[1]
    for rows, length in [(2, 16), (2, 9), (2, 12), (2, 5)]:
        cut = {name: value[:rows, :length] if value.ndim == 2 else value[:rows] for name, value in batch.items()}
        assert_step_as_eager(eager, ours, **cut)
    assert ort_accel.report(ours).counters["compilations"] == 4


@pytest.mark.parametrize("level", mostly_long([0, 1], 1))
def test_gradient_checkpointing_becomes_part_of_the_plan(level):
    model = accelerated("bert", {"level": level})
    model.gradient_checkpointing_enable()
    trace = step(model, **model_and_batch("bert")[1])
    memory = list(ort_accel.report(model).memory.values())[-1]
    assert_same_bits(trace, plain("bert")[0])
    assert memory.stash < 0.4 * memory.stash_without
    again = [name for segment in ort_accel.report(model).segments if "back" in segment.graph for name in segment.ops]
    assert "ort_accel.kept.default" not in again, "masks are kept, not drawn again"


def test_a_model_without_layers_causes_a_warning(caplog):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    ours = ort_accel.accelerate(model, {"memory": {"level": 1}})
    with caplog.at_level(logging.WARNING, logger="ort_accel"):
        ours(torch.randn(3, 4)).sum().backward()
    assert "no transformer layer was found" in caplog.text
    assert any("no transformer layer" in note for note in ort_accel.report(ours).notes)


def test_type_2_saves_the_smaller_copy_before_a_cast():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Parameter(torch.randn(8, 8).bfloat16())

        def forward(self, x):
            half = torch.cumsum(x.bfloat16() @ self.inner, -1)
            return half.float().square().sum()

    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(16, 8)
    results = []
    for plans in ([], ["Cast+:2:-1"]):
        model.zero_grad()
        quiet = {"memory": {"level": 0, "plans": plans, "probe": "0:0"}, "observe": {"log_level": "error"}}
        ours = ort_accel.accelerate(model, quiet)
        ours(x).backward()
        results.append((model.inner.grad.clone(), list(ort_accel.report(ours).memory.values())[-1]))
    (before, _), (after, memory) = results
    assert torch.equal(before, after)
    assert memory.stash_without - memory.stash == 16 * 8 * 2, "two bytes an element instead of four"


@pytest.mark.parametrize(("dropout", "fusions"), mostly_long(product([0.1, 0.0], ["auto", False]), (0.1, "auto")))
def test_post_norm_and_pre_norm_layers_are_found(dropout, fusions):
    shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 3}
    shape |= {"hidden_dropout_prob": dropout}
    bert = hf.BertForMaskedLM(hf.BertConfig(**shape, vocab_size=64))
    vit = hf.ViTForImageClassification(hf.ViTConfig(**shape, image_size=32))
    ids = torch.randint(0, 64, (2, 8))
    for model, batch in [
        (bert, {"input_ids": ids, "labels": ids}),
        (vit, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}),
    ]:
        config = {"memory": {"level": 1}, "observe": {"log_level": "error"}, "compute": {"fusions": fusions}}
        ours = ort_accel.accelerate(model.train(), config)
        ours(**batch).loss.backward()
        assert list(ort_accel.report(ours).memory.values())[-1].layers == 3


def test_recompute_does_not_read_overwritten_inputs():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("count", torch.ones(8))

        def forward(self, x):
            y = nn.functional.gelu(self.inner(x) + self.count)
            with torch.no_grad():
                self.count.mul_(3)
            return (y**3).sum() + (y * y.detach().sigmoid()).sum()

    torch.manual_seed(0)
    model, x = Counting(), torch.randn(4, 8)

    def trained(plans):
        memory = {"level": 0, "plans": plans}
        ours = ort_accel.accelerate(copy.deepcopy(model), {"memory": memory, "observe": {"log_level": "error"}})
        for _ in range(2):
            ours(x).backward()
        return ours.inner.weight.grad, list(ort_accel.report(ours).memory.values())[-1]

    before, memory = trained([])
    after, memory = trained([f"{row.cluster}:{row.kind}:-1" for row in memory.plans])
    assert memory.repeated
    assert torch.equal(before, after)
