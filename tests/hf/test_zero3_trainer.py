"""A Trainer with `deepspeed=` and ZeRO stage 3 in two processes trains on the engine as it does without."""

import importlib.util
import json

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
ROUNDING = {"rel": 1e-5, "abs": 1e-5}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What both processes saw."""
    folder = tmp_path_factory.mktemp("trainers")
    run_ranks("tests.hf.zero3_trainer", folder, timeout=300.0, OMP_NUM_THREADS="1")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_losses_in_training_and_evaluation_are_stock_ones(seen):
    stock, mine = seen[0]["eager"], seen[0]["ORTTrainer"]
    assert len(stock["losses"]) == 4
    assert stock["losses"][0] != pytest.approx(stock["losses"][-1], abs=1e-3), "nothing was learned"
    assert mine["losses"] == pytest.approx(stock["losses"], **ROUNDING)
    assert mine["evaluated"] == pytest.approx(stock["evaluated"], **ROUNDING)


def test_weights_that_are_saved_are_stock_ones(seen):
    assert seen[0]["furthest"] < 1e-5


@pytest.mark.parametrize("side", ["callback", "eager"])
def test_a_checkpoint_of_either_side_resumes_on_the_other(seen, side):
    resumed = seen[0][f"{side} from a checkpoint"]
    assert resumed["losses"] == pytest.approx(seen[0]["eager"]["losses"], **ROUNDING)


def test_it_runs_layer_by_layer(seen):
    for process in seen:
        features = {feature["name"]: feature for feature in process["report"]["features"]}
        assert features["distributed.zero3"]["state"] == "applied"
        assert "3 layers (Linear, LlamaDecoderLayer)" in features["distributed.zero3"]["effect"]
        assert any(segment["runner"] == "onnxruntime" for segment in process["report"]["segments"])
