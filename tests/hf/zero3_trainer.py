"""One or two processes with a Trainer under ZeRO. Started by test_zero3_trainer.py, and again to go on from before."""

import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

import ort_accel
from ort_accel.run import end
from tests.hf.tiny import llama, losses, texts, train

PROCESSES = int(os.environ["WORLD_SIZE"])
HALF, WHOLE = 2, 4


def deepspeed_config(stage, universal):
    whole = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **(whole if stage == 3 else {})},
        **({"checkpoint": {"load_universal": True}} if universal else {}),
    }


def two_layers():
    return llama(num_hidden_layers=2)


def run(side, folder, resume=None, stage=3, universal=False):
    """Train with a checkpoint in between, and where all of it is compared, with evaluation."""
    trainer = train(
        side,
        folder,
        build=two_layers,
        resume=resume and str(resume),
        train_dataset=texts(),
        eval_dataset=texts(8),
        deepspeed=deepspeed_config(stage, universal),
        per_device_train_batch_size=4 // PROCESSES,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_steps=WHOLE,
        eval_strategy="no" if universal else "steps",
        eval_steps=HALF,
        save_strategy="steps",
        save_steps=HALF,
    )
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return trainer, {"losses": losses(trainer), "evaluated": evaluated}


def make_universal(checkpoint):
    """The command of docs/distributed.md, in this process."""
    folders = ["--input_folder", checkpoint / f"global_step{HALF}", "--output_folder", checkpoint / "universal"]
    alone = ["--num_extract_workers", 1, "--num_merge_workers", 1]
    words = ["ds_to_universal", *folders, "--inject_missing_state", *alone]
    with mock.patch.object(sys, "argv", list(map(str, words))):
        runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")


def of(processes, stage, folder):
    """Where a run of so many processes lies."""
    return Path(folder, f"stage {stage} of {processes}")


def begin(rank, folder, stage):
    """Train without the engine, and leave a checkpoint that any number of processes can go on from."""
    place = of(PROCESSES, stage, folder)
    found = run("eager", place, stage=stage)[1]
    if rank == 0:
        make_universal(place / f"checkpoint-{HALF}")
    torch.distributed.barrier()
    return found


def go_on(side, folder, stage, processes):
    """Go on from where other processes were; only losses are compared."""
    checkpoint = of(processes, stage, folder) / f"checkpoint-{HALF}"
    place = Path(folder, f"{side} stage {stage} in {PROCESSES}")
    return run(side, place, checkpoint, stage=stage, universal=True)[1]["losses"]


def compare(rank, folder):
    """Both sides from the start, and from a checkpoint of the other side."""
    seen = {"eager": begin(rank, folder, 3)}
    trainer, seen["ORTTrainer"] = run("ORTTrainer", Path(folder, "ORTTrainer"))
    trainer.save_model(str(Path(folder, "ORTTrainer", "saved")))
    seen["report"] = ort_accel.report(trainer.model).to_dict()
    checkpoint = Path(folder, "ORTTrainer", f"checkpoint-{HALF}")
    seen["eager from a checkpoint"] = run("eager", Path(folder, "eager resumed"), checkpoint)[1]["losses"]
    seen["callback from a checkpoint of one"] = go_on("callback", folder, 3, 1)
    if rank == 0:
        saved = [of(2, 3, folder) / f"checkpoint-{WHOLE}", Path(folder, "ORTTrainer", "saved")]
        eager, mine = (load_file(place / "model.safetensors") for place in saved)
        seen["furthest"] = max((eager[name] - mine[name]).abs().max().item() for name in eager)
    return seen


def main(rank, folder, phase):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if phase == "alone first":
        seen = begin(rank, folder, 3)
    elif phase == "together":
        seen = compare(rank, folder)
        begin(rank, folder, 2)
    else:
        seen = {"eager": go_on("eager", folder, 3, 2)}
        seen |= {f"stage {stage}": go_on("ORTTrainer", folder, stage, 2) for stage in (2, 3)}
    Path(folder, f"{phase} {rank}.json").write_text(json.dumps(seen))
    end(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
