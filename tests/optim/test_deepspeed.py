"""FP16_Optimizer on the optimizers of DeepSpeed ZeRO-1 and ZeRO-2, in two processes."""

import importlib.util
import json

import pytest
import torch

from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What both processes saw."""
    folder = tmp_path_factory.mktemp("deepspeed")
    run_ranks("tests.optim.deepspeed_worker", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_losses_norms_and_scales_equal_deepspeeds_own(seen, rank, stage, precision):
    run = seen[rank][f"{stage} {precision}"]
    assert run["mine"] == run["theirs"]
    assert run["same"]
    assert run["calls"] >= 15, "a check and a norm for each of 15 steps, less those that overflowed"
    overflows = [overflow for _, _, overflow, _ in run["theirs"]]
    assert any(overflows) == (precision == "fp16")
    assert not all(overflows)
    assert run["theirs"][-1][0] < run["theirs"][0][0]


def test_gradients_that_reach_zero_2_early_train_as_its_own(seen):
    for process in seen:
        run = process["early"]
        assert run["early"] == pytest.approx(run["stock"], rel=1e-4)
        if torch.__version__ >= (2, 12):
            assert run["effect"] == "6 parameters get their gradients before the backward ends"
        else:  # Dynamo cannot follow the hooks that deepspeed.initialize puts on a model
            assert run["breaks"] == ["a graph break"]


def test_a_difference_in_one_process_keeps_the_original_in_all_processes(seen):
    for process in seen:
        assert process["refusals"]["replaced"] == ["has_overflow_partitioned_grads_serial"]


def test_stage_3_is_refused_with_the_reason(seen):
    for process in seen:
        assert "only ZeRO stages 1 and 2 have their checks there" in process["refusals"]["stage 3"]


def test_a_trainer_builds_fused_adam_under_zero_and_replaces_the_checks(seen):
    for process in seen:
        trained = process["trainer"]
        assert (trained["made by"], trained["inside"]) == ("DeepSpeedZeroOptimizer", "FusedAdam")
        assert trained["replaced"] == ["has_overflow_partitioned_grads_serial", "get_grad_norm_direct"]
        assert len(trained["losses"]) == 3
