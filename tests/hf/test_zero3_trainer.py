"""A Trainer with `deepspeed=` trains on the engine as it does without, and goes on in other numbers of processes."""

import importlib.util
import json

import pytest

from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
ROUNDING = {"rel": 1e-5, "abs": 1e-5}
COUNTED_TWICE = {"abs": 1e-3}
"""DeepSpeed 0.19.8 lets the groups of parameters share Adam's count of steps when it loads a universal checkpoint."""


@pytest.fixture(scope="module")
def phases(tmp_path_factory):
    """What one process saw, then two that also went on from there, then one that went on from the two."""
    folder = tmp_path_factory.mktemp("trainers")
    found = {}
    for phase, ranks in (("alone first", 1), ("together", 2), ("alone again", 1)):
        run_ranks("tests.hf.zero3_trainer", folder, phase, ranks=ranks, timeout=900.0, OMP_NUM_THREADS="1")
        found[phase] = [json.loads((folder / f"{phase} {rank}.json").read_text()) for rank in range(ranks)]
    return found


@pytest.fixture(scope="module")
def seen(phases):
    """What both processes saw."""
    return phases["together"]


def test_losses_in_training_and_evaluation_are_stock_ones(seen):
    stock, mine = seen[0]["eager"], seen[0]["ORTTrainer"]
    assert len(stock["losses"]) == 4
    assert stock["losses"][0] != pytest.approx(stock["losses"][-1], abs=1e-3), "nothing was learned"
    assert mine["losses"] == pytest.approx(stock["losses"], **ROUNDING)
    assert mine["evaluated"] == pytest.approx(stock["evaluated"], **ROUNDING)


def test_weights_that_are_saved_are_stock_ones(seen):
    assert seen[0]["furthest"] < 1e-5


def test_a_checkpoint_goes_on_without_the_engine(seen):
    assert seen[0]["eager from a checkpoint"] == pytest.approx(seen[0]["eager"]["losses"], **ROUNDING)


def test_it_runs_layer_by_layer(seen):
    for process in seen:
        features = {feature["name"]: feature for feature in process["report"]["features"]}
        assert features["distributed.zero3"]["state"] == "applied"
        assert "3 layers (Linear, LlamaDecoderLayer)" in features["distributed.zero3"]["effect"]
        assert any(segment["runner"] == "onnxruntime" for segment in process["report"]["segments"])


def test_a_universal_checkpoint_resumes_with_another_number_of_processes(phases):
    (first,), two, (again,) = phases["alone first"], phases["together"], phases["alone again"]
    whole = pytest.approx(first["losses"], **ROUNDING)
    assert two[0]["eager"]["losses"] == whole
    assert again["stage 2"] == whole
    stock = pytest.approx(again["eager"], **ROUNDING)
    assert again["stage 3"] == stock
    assert two[0]["callback from a checkpoint of one"] == stock
    assert again["eager"] == pytest.approx(first["losses"], **COUNTED_TWICE)
