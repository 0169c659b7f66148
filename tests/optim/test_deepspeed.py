"""FP16_Optimizer on the optimizers of DeepSpeed ZeRO-1 and ZeRO-2, in two processes."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

ROOT = Path(__file__).parent.parent.parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What both processes saw."""
    folder = tmp_path_factory.mktemp("deepspeed")
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.optim.deepspeed_worker", str(rank), str(folder)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)[-6000:]
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


def test_a_difference_in_one_process_keeps_the_original_in_all(seen):
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
