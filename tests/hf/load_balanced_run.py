"""One process of a training run with load balancing: writes which samples its steps had. Run by torchrun."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback

from ort_accel.hf import ORTTrainer, ORTTrainingArguments
from ort_accel.run import end

LENGTHS = [1 + (7 * n * n) % 90 for n in range(44)]


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return {"input_ids": [index] * LENGTHS[index]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, input_ids):
        self.seen.append(input_ids.tolist())
        return {"loss": (self.weight * input_ids).mean()}


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def main(folder, stop, resume):
    args = ORTTrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = ORTTrainer(
        Model(),
        args,
        train_dataset=Samples(),
        data_collator=lambda samples: {"input_ids": torch.tensor([sample["input_ids"][0] for sample in samples])},
        callbacks=[StopAfter(int(stop))],
        ort_config={
            "engine": {"enabled": False},
            "distributed": {"load_balancing": {"enabled": True}},
            "observe": {"report_file": f"{folder}/report-{stop}-{resume}.json"},
        },
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{stop}" if resume == "resume" else None)
    Path(folder, f"{stop}-{resume}-{args.process_index}.json").write_text(json.dumps(trainer.model.seen))
    torch.distributed.barrier()
    end(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
