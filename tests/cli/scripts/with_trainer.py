"""A script with a Trainer, which knows nothing of ort_accel but for what it writes down at the end."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ort_accel


def main(out):
    folder = Path(out).parent
    set_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=32,
        )
    )
    ids = torch.randint(1, 32, (24, 7))
    data = [{"input_ids": row, "labels": row} for row in ids]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=8 // processes,
        per_device_eval_batch_size=8,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    try:
        report = ort_accel.report(model).to_dict()
    except ort_accel.OrtAccelError:
        report = None
    if trainer.is_world_process_zero():
        Path(out).write_text(json.dumps({"losses": losses, "report": report, "processes": processes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
