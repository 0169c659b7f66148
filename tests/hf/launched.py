"""A script with a plain Trainer, for the ways to launch one: dies twice, resumes, and does what else people do."""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import peft
from transformers import Trainer, TrainerCallback

import ort_accel
from ort_accel.compiler import backend
from tests.hf.tiny import bert, losses, reviews, train

STEPS = 8
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "max_steps": STEPS}


class Slow(TrainerCallback):
    """Leaves time between two saves."""

    def on_step_end(self, *_, **__):
        time.sleep(0.03)


def adapted():
    lora = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    return peft.get_peft_model(bert(), peft.LoraConfig("SEQ_CLS", **lora))


def kill_inside_a_save():
    """Die when the weights of checkpoint 4 are written, and what belongs to them is not."""
    save_rng_state = Trainer._save_rng_state

    def killed(self, folder):
        save_rng_state(self, folder)
        if self.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer._save_rng_state = killed


def kill_at_random(folder):
    """Die at any moment after checkpoint 1 is there."""

    def wait_and_kill():
        while not (folder / "checkpoint-1").exists():
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_kill, daemon=True).start()


def die(folder, moment):
    """Train in a process that is killed; returns where it left checkpoint 4.

    It is forked before torch has threads, which saves a start.
    """
    child = os.fork()
    if child == 0:
        kill_inside_a_save() if moment == "inside a save" else kill_at_random(folder)
        train("eager", folder, callbacks=[Slow()], **EVERY_STEP)
        time.sleep(600)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    return [str(entry.relative_to(folder)) for entry in folder.glob("**/checkpoint-4")]


def segments(model):
    """How many parts of the model ONNX Runtime ran, whoever put it there."""
    try:
        return len(ort_accel.report(model).segments)
    except ort_accel.OrtAccelError:
        return len(backend.registered(ort_accel.load_config()).report.segments)


def last_whole(folder):
    """The checkpoint that a careful person would resume from; None if there is none."""

    def is_whole(checkpoint):
        try:
            return bool(json.loads((checkpoint / "trainer_state.json").read_text()))  # written last
        except (OSError, ValueError):
            return False

    return next((str(one) for one in sorted(folder.glob("checkpoint-*"), reverse=True) if is_whole(one)), None)


def main(out, eagers_checkpoint, resume):
    """`resume` says whether the Trainer finds the checkpoint to go on from by itself, or a person does."""
    folder = Path(out)
    found = {}
    for moment in ("inside a save", "at random"):
        found[f"left when it died {moment}"] = die(folder / moment, moment)
    for moment in ("inside a save", "at random"):
        checkpoint = True if resume == "by itself" else last_whole(folder / moment)
        trainer = train("eager", folder / moment, resume=checkpoint, **EVERY_STEP)
        found[f"resumed after it died {moment}"] = losses(trainer)
    found["evaluated"] = trainer.evaluate()["eval_loss"]
    found["predicted"] = trainer.predict(reviews(8)).predictions.tolist()
    trainer.save_model(str(folder / "saved"))
    found["resumed from eager"] = losses(train("eager", folder / "other", resume=eagers_checkpoint, max_steps=STEPS))
    found["with an adapter"] = losses(train("eager", folder / "lora", build=adapted, **EVERY_STEP))
    found["segments"] = segments(trainer.model)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
