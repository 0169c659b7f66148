"""The other examples, as a user runs them, at a small size: eager and ort_accel print the same losses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.figures import figures

FOLDER = Path(__file__).parents[2] / "examples" / "hf"
SAMPLES = ["--max_train_samples=8", "--max_eval_samples=8", "--per_device_train_batch_size=4", "--compare_eager"]
STEPS = ["--max_steps=3", "--logging_steps=1"]
SHORT = "--max_seq_length=16"
SMALL = {
    "run_mlm": [*STEPS, SHORT, "--mlm_probability=0.4"],
    "run_clm": [*STEPS, "--block_size=16", "--hidden_size=64", "--num_hidden_layers=1"],
    "run_seq2seq": [
        *STEPS,
        *("--max_source_length=16", "--max_target_length=8", "--d_model=64", "--num_layers=1"),
        *("--predict_with_generate", "--generation_max_length=8"),
    ],
    "run_lora": [*STEPS, SHORT],
    "run_sft": [
        *STEPS,
        *("--prompt_words=12", "--answer_words=12", "--hidden_size=64", "--num_hidden_layers=1"),
    ],
    "run_packed_sft": [
        *STEPS,
        *("--prompt_words=12", "--answer_words=12", "--hidden_size=64", "--num_hidden_layers=1", "--max_length=64"),
    ],
    "run_qlora": [*STEPS, "--block_size=16", "--hidden_size=64", "--num_hidden_layers=1"],
    "accelerate_loop": [SHORT, "--num_train_epochs=2"],
}

NEEDS = {"run_lora": "peft", "run_qlora": "bitsandbytes", "run_sft": "trl", "run_packed_sft": "trl"}


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_both_columns_show_the_same_losses(tmp_path, name):
    pytest.importorskip(NEEDS.get(name, "transformers"))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(FOLDER.parents[1])}
    command = [sys.executable, str(FOLDER / f"{name}.py"), *SAMPLES, *SMALL[name]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "ONNX Runtime's kernels" in done.stdout
    table = figures(done.stdout)
    for row in ("train loss, last logged", "held-out loss"):
        assert table[row][0] == pytest.approx(table[row][1], abs=2e-3)
    assert all(value > 0 for value in table["tokens/s, all steps"])
