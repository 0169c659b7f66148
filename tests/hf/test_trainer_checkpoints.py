"""Checkpoints: whole or not there, with eager's keys, and good for either side."""

import random
import signal
import time

import pytest
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback, Trainer, set_seed
from transformers.trainer_utils import get_last_checkpoint

from tests.hf.tiny import arguments, bert, in_python, losses, make, reviews, train
from tests.tiers import mostly_long

OURS = ("ORTTrainer", "callback")
OFF = {"engine": {"enabled": False}}
"""How files are written does not depend on what computes the steps."""
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "max_steps": 8}

CHILD = """
import os, signal, sys, time
from transformers import Trainer, TrainerCallback
from tests.hf.tiny import train

side, folder, moment = sys.argv[1:]

class Slow(TrainerCallback):
    def on_step_end(self, *_, **__):
        time.sleep(0.03)

save_rng_state = Trainer._save_rng_state

def killed(self, folder):
    save_rng_state(self, folder)
    if self.state.global_step == 4:
        os.kill(os.getpid(), signal.SIGKILL)

if moment == "inside a save":
    Trainer._save_rng_state = killed
train(side, folder, save_strategy="steps", save_steps=1, max_steps=8, callbacks=[Slow()])
time.sleep(600)
"""


def folders(path):
    return sorted(entry.name for entry in path.iterdir())


def keys(checkpoint):
    with safe_open(str(checkpoint / "model.safetensors"), "pt") as file:
        return list(file.keys())


def kill_at_random(child, folder, delay):
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint-1").exists():
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(delay)
    child.kill()


@pytest.mark.parametrize("moment", mostly_long(["inside a save", "at random"], "inside a save"))
@pytest.mark.parametrize("side", mostly_long(OURS, "callback"))
def test_a_killed_run_resumes_from_a_whole_checkpoint_with_eagers_losses(tmp_path, side, moment):
    child = in_python(CHILD, side, tmp_path, moment)
    delay = random.uniform(0, 0.5)
    if moment == "at random":
        kill_at_random(child, tmp_path, delay)
    _, errors = child.communicate(timeout=900)
    assert child.returncode == -signal.SIGKILL, errors
    last = get_last_checkpoint(str(tmp_path))
    if moment == "inside a save":
        assert last.endswith("checkpoint-3")
        assert folders(tmp_path / "_saving") == ["checkpoint-4"]
    resumed = train(side, tmp_path, resume=True, **EVERY_STEP)
    assert losses(resumed) == pytest.approx(losses(train("eager", tmp_path / "eager", max_steps=8)), abs=1e-5), delay
    assert "_saving" not in folders(tmp_path)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("callback", "eager"),
        ("eager", "ORTTrainer"),
        pytest.param("ORTTrainer", "eager", marks=pytest.mark.long),
        pytest.param("eager", "callback", marks=pytest.mark.long),
    ],
)
def test_each_side_resumes_the_checkpoints_of_the_other(tmp_path, writer, reader):
    whole = train("eager", tmp_path / "whole", save_strategy="steps", save_steps=2)
    train(writer, tmp_path / "half", save_strategy="steps", save_steps=2)
    half = tmp_path / "half" / "checkpoint-2"
    assert keys(half) == keys(tmp_path / "whole" / "checkpoint-2")
    assert folders(half) == folders(tmp_path / "whole" / "checkpoint-2")
    resumed = train(reader, tmp_path / "other", seed=3, resume=str(half))
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-5)


@pytest.mark.parametrize("side", mostly_long(OURS, "callback"))
def test_plain_transformers_loads_what_was_saved(tmp_path, side):
    trainer = train(side, tmp_path, bert, max_steps=2)
    trainer.save_model(str(tmp_path / "saved"))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert type(plain) is type(trainer.model)
    assert plain._compiled_call_impl is None
    other = make("eager", plain, arguments(tmp_path))
    assert other.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-5)


@pytest.mark.long
def test_rotation_early_stopping_and_the_best_model_are_eagers(tmp_path):
    def run(side):
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2}
        every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        stop = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=0.001)
        trainer = train(side, tmp_path / side, max_steps=6, learning_rate=3e-2, callbacks=[stop], **best, **every)
        noted = trainer.state.best_model_checkpoint.removeprefix(str(tmp_path / side))
        return trainer.state.global_step, noted, folders(tmp_path / side)

    eager = run("eager")
    assert run("callback") == eager
    assert run("ORTTrainer") == eager


def test_the_best_checkpoint_that_is_noted_inside_exists(tmp_path):
    from transformers import TrainerState

    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"metric_for_best_model": "loss", "load_best_model_at_end": True}
    train("ORTTrainer", tmp_path, max_steps=2, config=OFF, **best, **every)
    state = TrainerState.load_from_json(str(tmp_path / "checkpoint-2" / "trainer_state.json"))
    assert state.best_model_checkpoint == str(tmp_path / f"checkpoint-{state.best_global_step}")


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    train("eager", tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    (tmp_path / "checkpoint-1" / "left over").touch()
    train("ORTTrainer", tmp_path, max_steps=1, save_strategy="steps", save_steps=1, config=OFF)
    assert folders(tmp_path) == ["checkpoint-1"]
    assert "left over" not in folders(tmp_path / "checkpoint-1")


def test_the_upload_is_the_complete_checkpoint(tmp_path, monkeypatch):
    pushed = []

    def push(self, folder):
        pushed.append((folder, folders(tmp_path)))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self, *args, **kwargs: None)
    set_seed(0)
    args = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, push_to_hub=True)
    from tests.hf.tiny import bert

    trainer = make("ORTTrainer", bert(), args, OFF, train_dataset=reviews())
    trainer.train()
    assert pushed == [(str(tmp_path / "checkpoint-1"), ["checkpoint-1"])]


def test_a_trainer_without_the_callback_saves_as_it_always_did(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "_save_rng_state", lambda self, folder: seen.append(folder))
    train("eager", tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    train("ORTTrainer", tmp_path, max_steps=1, save_strategy="steps", save_steps=1, config=OFF)
    assert seen == [str(tmp_path / "checkpoint-1"), str(tmp_path / "_saving" / "checkpoint-1")]
