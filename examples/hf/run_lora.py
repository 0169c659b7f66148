"""Fine-tune a LoRA adapter of MiniLM on film reviews, on ONNX Runtime, and beside it on eager PyTorch.

python examples/hf/run_lora.py --compare_eager
python examples/hf/run_lora.py --lora_r 16 --lora_alpha 32
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import run_classification as classification
from compare import exit_code, train_and_show
from peft import LoraConfig, get_peft_model
from rich.console import Console
from texts import LABELS
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    set_seed,
)

import ort_accel
from ort_accel.hf import ORTTrainer


@dataclass
class ScriptArguments(classification.ScriptArguments):
    """Those of run_classification.py, and the adapter's."""

    lora_r: int = field(default=8, metadata={"help": "The rank of the adapter."})
    lora_alpha: int = field(default=16, metadata={"help": "Its scale."})
    lora_dropout: float = field(default=0.1, metadata={"help": "The dropout in front of it."})


@dataclass
class Arguments(classification.Arguments):
    """All training arguments of transformers; an adapter takes a higher learning rate."""

    output_dir: str | None = "out/lora"
    learning_rate: float = 1e-3


def adapted(script: ScriptArguments) -> PreTrainedModel:
    """The model with an adapter in each attention; its head is trained as a whole."""
    model = AutoModelForSequenceClassification.from_pretrained(
        script.model_name_or_path, num_labels=len(LABELS), problem_type="single_label_classification"
    )
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=script.lora_r,
        lora_alpha=script.lora_alpha,
        lora_dropout=script.lora_dropout,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
    )
    return get_peft_model(model, lora)


def run(script: ScriptArguments, training: Arguments, console: Console) -> None:
    """Train once, or twice to compare, show what was measured, and save the adapter."""
    ort_accel.load_config(training.ort_config)  # a wrong file is refused before anything runs
    task = classification.prepare(script, training)
    console.print(f"{len(task.train)} film reviews to train on, {len(task.held_out)} others held out.")

    def build(kind: type[Trainer]) -> Trainer:
        set_seed(training.seed)
        return kind(
            model=adapted(script),
            args=training,
            train_dataset=task.train,
            eval_dataset=task.held_out,
            processing_class=task.tokenizer,
            data_collator=DataCollatorWithPadding(task.tokenizer),
            compute_metrics=classification.accuracy,
        )

    train_and_show(build, ORTTrainer, Trainer if script.compare_eager else None, console).save_model()


def main() -> int:
    """Read the arguments, then train."""
    script, training = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    return exit_code(lambda: run(script, training, Console()))


if __name__ == "__main__":
    sys.exit(main())
