"""An untouched script with a Trainer, launched on ONNX Runtime in two ways: what people do with it, as in eager."""

import json
import os
import subprocess
import sys

import numpy
import pytest
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification, set_seed

from tests.hf import launched
from tests.hf.launched import EVERY_STEP, STEPS
from tests.hf.tiny import ROOT, arguments, losses, make, reviews, train

pytest.importorskip("peft")
pytestmark = pytest.mark.long

WAYS = {
    "ort-accel launch": ["-m", "ort_accel", "launch", "--cpu"],
    "dynamo onnxrt": ["-m", "accelerate.commands.launch", "--cpu", "--dynamo_backend", "onnxrt"],
}
LIMITS = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]


def keys(folder):
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        return list(file.keys())


def same(expected):
    return pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """The same work in eager, and where its checkpoints lie."""
    folder = tmp_path_factory.mktemp("eager")
    trainer = train("eager", folder, **EVERY_STEP)
    return {
        "folder": folder,
        "losses": losses(trainer),
        "evaluated": trainer.evaluate()["eval_loss"],
        "predicted": trainer.predict(reviews(8)).predictions,
        "with an adapter": losses(train("eager", folder / "lora", build=launched.adapted, **EVERY_STEP)),
    }


@pytest.fixture(scope="module", params=WAYS)
def run(request, eager, tmp_path_factory):
    """One process for each way: it trains, dies and resumes, and writes down what it found."""
    folder = tmp_path_factory.mktemp("launched")
    resume = "by itself" if request.param == "ort-accel launch" else "by name"
    words = [launched.__file__, folder, eager["folder"] / "checkpoint-6", resume]
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "ORT_ACCEL_"))}
    done = subprocess.run(
        [sys.executable, *WAYS[request.param], *LIMITS, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**keep, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return request.param, folder, json.loads((folder / "found.json").read_text())


def test_a_killed_run_resumes_with_eagers_losses(run, eager):
    _, _, found = run
    assert found["resumed after it died inside a save"] == same(eager["losses"])
    assert found["resumed after it died at random"] == same(eager["losses"])
    assert found["segments"], "nothing ran on the engine"


def test_only_ort_accel_launch_makes_checkpoints_atomic(run):
    way, _, found = run
    where = {"ort-accel launch": "_saving/checkpoint-4", "dynamo onnxrt": "checkpoint-4"}
    assert found["left when it died inside a save"] == [where[way]]


def test_evaluation_and_prediction_are_eagers(run, eager):
    _, _, found = run
    assert found["evaluated"] == same(eager["evaluated"])
    numpy.testing.assert_allclose(found["predicted"], eager["predicted"], atol=1e-5)


def test_a_checkpoint_of_either_side_resumes_on_the_other(run, eager, tmp_path):
    _, folder, found = run
    written = folder / "at random" / "checkpoint-6"
    assert keys(written) == keys(eager["folder"] / "checkpoint-6")
    assert losses(train("eager", tmp_path, resume=str(written), max_steps=STEPS)) == same(eager["losses"])
    assert found["resumed from eager"] == same(eager["losses"])


def test_plain_transformers_loads_what_was_saved(run, eager, tmp_path):
    _, folder, _ = run
    set_seed(0)
    plain = AutoModelForSequenceClassification.from_pretrained(folder / "saved")
    assert make("eager", plain, arguments(tmp_path)).evaluate()["eval_loss"] == same(eager["evaluated"])


def test_an_adapter_trains_as_in_eager(run, eager):
    _, _, found = run
    assert found["with an adapter"] == same(eager["with an adapter"])
