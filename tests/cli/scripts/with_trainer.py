"""A script with a Trainer, which knows nothing of ort_accel but for what it writes down at the end."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ort_accel

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def train(folder, resume=None, **more):
    """Train a fresh model, with a checkpoint before the last step; returns the trainer and its losses."""
    set_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    ids = torch.randint(1, 32, (24, 7))
    data = [{"input_ids": row, "labels": row} for row in ids]
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8 // PROCESSES,
        per_device_eval_batch_size=8,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="steps",
        save_steps=2,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data, **more)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(out, checkpoint=None):
    """With a checkpoint, train from there too."""
    folder = Path(out).parent
    trainer, losses = train(folder / "out")
    losses.append(trainer.evaluate()["eval_loss"])
    try:
        report = ort_accel.report(trainer.model).to_dict()
    except ort_accel.OrtAccelError:
        report = None
    resumed = train(folder / "resumed", checkpoint)[1] if checkpoint else None
    if trainer.is_world_process_zero():
        found = {"losses": losses, "resumed": resumed, "report": report, "processes": PROCESSES}
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
