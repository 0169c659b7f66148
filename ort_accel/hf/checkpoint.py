"""Atomic checkpoints: a checkpoint is written under another name, and renamed when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

Trial = Any
"""A trial of a hyperparameter search, of any backend; None outside of a search."""

UNFINISHED_FOLDER = "_saving"
"""The folder for unfinished checkpoints, which resuming and uploads ignore."""


def save_atomically(trainer: Trainer, save: Callable[[], None], trial: Trial) -> None:
    """Let a Trainer save a checkpoint by its own method `save`; a killed process leaves no incomplete one."""
    run = Path(trainer._get_output_dir(trial))
    unfinished, folder = run / UNFINISHED_FOLDER, f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    if trainer.args.should_save:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a killed process
    trainer.accelerator.wait_for_everyone()
    uploads: list[str] = []
    overrides = {"_get_output_dir": lambda *_, **__: str(unfinished), "_push_from_checkpoint": uploads.append}
    vars(trainer).update(overrides)
    try:
        save()
    finally:
        for name in overrides:
            del vars(trainer)[name]
    _correct_best(trainer, run, unfinished / folder)
    _publish(trainer, unfinished, run / folder)
    for _ in uploads:
        trainer._push_from_checkpoint(str(run / folder))
    if trainer.args.should_save:
        args, best = trainer.args, trainer.state.best_model_checkpoint
        rotate_checkpoints(str(run), args.save_total_limit, best, use_mtime=True)


def _correct_best(trainer: Trainer, run: Path, written: Path) -> None:
    """Set the path of the best checkpoint, since the Trainer saw only the unfinished folder."""
    state = trainer.state
    best = run / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    noted = state.best_model_checkpoint
    is_this_one = noted == str(written)
    if is_this_one or (state.best_global_step and best.name != written.name and best.is_dir()):
        state.best_model_checkpoint = str(best)
    if trainer.args.should_save and state.best_model_checkpoint != noted:
        state.save_to_json(str(written / "trainer_state.json"))


def _publish(trainer: Trainer, unfinished: Path, checkpoint: Path) -> None:
    """Rename the checkpoint when every process has written it, on each machine if they share no disk."""
    wait = trainer.accelerator.wait_for_everyone
    wait()
    if trainer.args.should_save:
        _rename(unfinished, checkpoint)
    wait()
    if trainer.args.local_process_index == 0 and unfinished.is_dir():
        _rename(unfinished, checkpoint)
    wait()


def _rename(unfinished: Path, checkpoint: Path) -> None:
    if checkpoint.exists():
        checkpoint.rename(unfinished / "replaced")
    (unfinished / checkpoint.name).rename(checkpoint)
    shutil.rmtree(unfinished)
