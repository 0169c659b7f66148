"""Models under ZeRO in two processes: on the engine they learn what they learn without it, layer by layer."""

import importlib.util
import json

import pytest
from torch import nn

import ort_accel
from tests.ranks import run_ranks, runs_in_ranks
from tests.tiers import mostly_long

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
LONG = ["bert", "lora", "checkpointing", "stage 0", "stage 1", "evaluation"]
OTHERS = ["llama", "skipping", "offloaded", "stage 2", "refusals", "parts"]
UNDER_STAGE_3 = mostly_long(
    ["llama", "bert", "lora", "checkpointing", "skipping", "offloaded"], "llama", "skipping", "offloaded"
)
UNDER_OTHERS = mostly_long(["stage 0", "stage 1", "stage 2"], "stage 2")
ROUNDING = {"rel": 1e-6, "abs": 2e-6}


@pytest.fixture(scope="module")
def see(tmp_path_factory):
    return runs_in_ranks("tests.zero3.zero_worker", tmp_path_factory, LONG, OTHERS, timeout=900.0)


def effects(report):
    return {feature["name"]: feature["effect"] for feature in report["features"]}


@needs_deepspeed
@pytest.mark.parametrize("name", [*UNDER_STAGE_3, *UNDER_OTHERS])
def test_losses_and_weights_equal_those_without_the_engine(see, name):
    runs = see(name)
    for run in runs:
        assert run["mine"] == pytest.approx(run["stock"], **ROUNDING)
        assert run["stock"][0] != run["stock"][2], "nothing was learned"
        assert run["furthest"] < 2e-6
    assert runs[0]["stock"] != runs[1]["stock"] or name in {"skipping", "offloaded"}


@needs_deepspeed
@pytest.mark.parametrize("name", UNDER_STAGE_3)
def test_no_more_is_gathered_than_two_layers_and_the_embeddings(see, name):
    for run in see(name):
        most = 2 * run["layer"] + run["tables"]
        assert run["looks"] > 100
        assert run["layer"] < run["live"] <= most, "the next layer is gathered while one computes, and no other"
        assert run["layer"] <= run["alive"] <= most, "what was saved for the backward holds gathered memory"
        assert run["whole"] > most


@needs_deepspeed
@pytest.mark.parametrize("name", UNDER_STAGE_3)
def test_gradients_of_no_more_than_a_layer_wait_to_be_shared(see, name):
    for run in see(name):
        assert 0 < run["gradients"] <= run["layer"]


@needs_deepspeed
def test_each_process_keeps_the_parts_of_gradients_that_deepspeed_would_give_it(see):
    assert_deepspeeds_parts(see("parts"))


@pytest.mark.long
@needs_deepspeed
def test_so_does_each_of_three_processes(tmp_path):
    run_ranks("tests.zero3.zero_worker", tmp_path, "parts", ranks=3)
    assert_deepspeeds_parts([json.loads((tmp_path / f"{rank}.json").read_text())["parts"] for rank in range(3)])


def assert_deepspeeds_parts(processes):
    for found in processes:
        for case, seen in found.items():
            assert seen["sizes"], case
            assert seen["types"], case
            assert seen["furthest"] <= (2**-6 if case == "small" else 1e-5), case


@needs_deepspeed
@pytest.mark.parametrize("name", UNDER_STAGE_3)
def test_deepspeed_shares_gradients_its_own_way_again_afterwards(see, name):
    assert [run["left behind"] for run in see(name)] == [[], []]


@needs_deepspeed
@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("llama", 8),  # decoder layers and the head, forward and backward, for fixed and for open sizes
        pytest.param("checkpointing", 4, marks=pytest.mark.long),
        ("skipping", 4),  # the first layer's input needs no gradient
    ],
)
def test_layers_that_are_alike_share_one_pair_of_graphs(see, name, graphs):
    for run in see(name):
        assert run["report"]["counters"]["compilations"] == graphs


@needs_deepspeed
def test_the_report_says_what_is_gathered(see):
    effect = effects(see("llama")[0]["report"])["distributed.zero3"]
    assert effect.startswith("5 layers (Linear, LlamaDecoderLayer) are gathered one by one, and one ahead")
    assert effect.endswith("the largest has 9,280 parameters")


@needs_deepspeed
@pytest.mark.parametrize("name", UNDER_OTHERS)
def test_a_model_that_is_not_partitioned_has_one_pair_of_graphs(see, name):
    report = see(name)[0]["report"]
    assert report["counters"]["compilations"] == 2
    assert "a graph break" not in {fallback["op"] for fallback in report["fallbacks"]}


@pytest.mark.long
@needs_deepspeed
def test_evaluation_saving_and_restoring_are_those_of_deepspeed(see):
    runs = see("evaluation")
    for run in runs:
        assert run["mine"] == pytest.approx(run["stock"], **ROUNDING)
        assert run["live after evaluation"] == 0
        assert run["again from the checkpoint"] == pytest.approx(run["restored"], **ROUNDING)
    assert runs[0]["same keys"]
    assert runs[0]["furthest"] < 2e-6


@needs_deepspeed
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("version", "need deepspeed >=1, not 0.19"),
        ("switch", "distributed.zero3 is false"),
        ("lacking", "lacks DeepSpeedZeRoOffload.a_method_of_later"),
    ],
)
def test_a_declined_model_trains_as_deepspeed_does_and_reports_the_reason(see, name, reason):
    for refused, plain in zip(see("refusals"), see("skipping"), strict=True):
        run = refused[name]
        assert (run["name"], run["state"]) == ("engine", "refused")
        assert reason in run["reason"]
        assert run["losses"] == plain["stock"][:4]


def test_an_explicit_wish_for_stage_3_is_an_error_without_it():
    with pytest.raises(ort_accel.ConfigError, match="this model is not partitioned by ZeRO stage 3"):
        ort_accel.accelerate(nn.Linear(2, 2), {"distributed": {"zero3": True}})
