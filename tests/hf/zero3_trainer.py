"""One of two processes with a Trainer under ZeRO stage 3. Started by test_zero3_trainer.py."""

import json
import sys
import warnings
from pathlib import Path

import deepspeed
import torch
from safetensors.torch import load_file

import ort_accel
from tests.hf.tiny import llama, losses, texts, train

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
HALF, WHOLE = 2, 4


def two_layers():
    return llama(num_hidden_layers=2)


def run(side, folder, resume=None):
    """Train with evaluation and a checkpoint in between."""
    trainer = train(
        side,
        folder,
        build=two_layers,
        resume=resume,
        train_dataset=texts(),
        eval_dataset=texts(8),
        deepspeed=DEEPSPEED,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=WHOLE,
        eval_strategy="steps",
        eval_steps=HALF,
        save_strategy="steps",
        save_steps=HALF,
    )
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return trainer, {"losses": losses(trainer), "evaluated": evaluated}


def main(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, and gloo is enough
    seen = {}
    for side in ("eager", "ORTTrainer"):
        trainer, seen[side] = run(side, Path(folder, side))
        trainer.save_model(str(Path(folder, side, "saved")))
    seen["report"] = ort_accel.report(trainer.model).to_dict()
    for side, other in (("eager", "ORTTrainer"), ("callback", "eager")):
        checkpoint = str(Path(folder, other, f"checkpoint-{HALF}"))
        seen[f"{side} from a checkpoint"] = run(side, Path(folder, f"{side} resumed"), checkpoint)[1]
    if rank == 0:
        weights = {
            side: load_file(Path(folder, side, "saved", "model.safetensors")) for side in ("eager", "ORTTrainer")
        }
        pairs = [(weights["eager"][name], weights["ORTTrainer"][name]) for name in weights["eager"]]
        seen["furthest"] = max((one - other).abs().max().item() for one, other in pairs)
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
