"""A checkpoint appears under its name when it is whole: it is written aside, and renamed last."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

ASIDE = "_saving"
"""The folder beside the checkpoints. Resuming does not look into it, and uploads leave out names that begin so."""


def save_whole(trainer: Trainer, save: Callable[[], None], trial: Any) -> None:
    """Let a Trainer save a checkpoint, so that a process killed meanwhile leaves none that is not whole.

    `save` is the Trainer's own saving. What it does with a finished checkpoint, rotation and upload, follows the
    renaming.
    """
    run = Path(trainer._get_output_dir(trial))
    aside, folder = run / ASIDE, f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    if trainer.args.should_save:
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    trainer.accelerator.wait_for_everyone()
    uploads: list[str] = []
    elsewhere = {"_get_output_dir": lambda *_, **__: str(aside), "_push_from_checkpoint": uploads.append}
    vars(trainer).update(elsewhere)
    try:
        save()
    finally:
        for name in elsewhere:
            del vars(trainer)[name]
    _correct_best(trainer, run, aside / folder)
    _publish(trainer, aside, run / folder)
    for _ in uploads:
        trainer._push_from_checkpoint(str(run / folder))
    if trainer.args.should_save:
        args, best = trainer.args, trainer.state.best_model_checkpoint
        rotate_checkpoints(str(run), args.save_total_limit, best, use_mtime=True)


def _correct_best(trainer: Trainer, run: Path, written: Path) -> None:
    """The Trainer notes where the best checkpoint is, if it sees it; it saw only the one that it wrote aside."""
    state = trainer.state
    best = run / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    noted = state.best_model_checkpoint
    is_this_one = noted == str(written)
    if is_this_one or (state.best_global_step and best.name != written.name and best.is_dir()):
        state.best_model_checkpoint = str(best)
    if trainer.args.should_save and state.best_model_checkpoint != noted:
        state.save_to_json(str(written / "trainer_state.json"))


def _publish(trainer: Trainer, aside: Path, checkpoint: Path) -> None:
    """Rename when every process has written. Where machines share no disk, each has a part to rename."""
    wait = trainer.accelerator.wait_for_everyone
    wait()
    if trainer.args.should_save:
        _rename(aside, checkpoint)
    wait()
    if trainer.args.local_process_index == 0 and aside.is_dir():
        _rename(aside, checkpoint)
    wait()


def _rename(aside: Path, checkpoint: Path) -> None:
    if checkpoint.exists():
        checkpoint.rename(aside / "replaced")
    (aside / checkpoint.name).rename(checkpoint)
    shutil.rmtree(aside)
