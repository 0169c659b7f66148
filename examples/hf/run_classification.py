"""Fine-tune MiniLM to tell good film reviews from bad ones, on ONNX Runtime, and beside it on eager PyTorch.

python examples/hf/run_classification.py --compare_eager
python examples/hf/run_classification.py --ort_config my.yaml --learning_rate 5e-5 --num_train_epochs 3
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare import exit_code, train_and_show
from rich.console import Console
from texts import LABELS, Review, film_reviews, minilm, split
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

import ort_accel
from ort_accel.hf import ORTTrainer, ORTTrainingArguments

CONFIG = Path(__file__).parents[2] / "configs" / "bert-classification.yaml"


@dataclass
class ScriptArguments:
    """The model, its data, and the switch for the comparison."""

    model_name_or_path: str = field(default="", metadata={"help": "A model; empty takes the packaged MiniLM."})
    max_seq_length: int = field(default=128, metadata={"help": "Reviews are cut after this many tokens."})
    held_out: float = field(default=0.3, metadata={"help": "The share of the reviews that is not trained on."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many reviews at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on this many reviews at most."})
    compare_eager: bool = field(default=False, metadata={"help": "Train on eager PyTorch first, and compare."})


@dataclass
class Arguments(ORTTrainingArguments):
    """All training arguments of transformers, with defaults that suit 140 reviews on a small CPU."""

    output_dir: str | None = "out/classification"
    ort_config: str | None = str(CONFIG)
    use_cpu: bool = True
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 16
    learning_rate: float = 1e-4
    warmup_steps: float = 0.1
    logging_strategy: str = "epoch"
    save_strategy: str = "no"


@dataclass(frozen=True)
class Task:
    """Everything that both runs share."""

    script: ScriptArguments
    training: Arguments
    tokenizer: PreTrainedTokenizerBase
    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]


def prepare(script: ScriptArguments, training: Arguments) -> Task:
    """Read, split and tokenize the reviews."""
    script.model_name_or_path = script.model_name_or_path or str(minilm())
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)

    def tokenized(reviews: list[Review]) -> list[dict[str, Any]]:
        cut = {"truncation": True, "max_length": script.max_seq_length}
        return [{**tokenizer(review.text, **cut), "labels": review.label} for review in reviews]

    train, held_out = split(film_reviews(), script.held_out, training.seed)
    train, held_out = train[: script.max_train_samples], held_out[: script.max_eval_samples]
    return Task(script, training, tokenizer, tokenized(train), tokenized(held_out))


def build(trainer: type[Trainer], task: Task) -> Trainer:
    """A trainer with a fresh model. The same seed gives the same head, the same batches and the same dropout."""
    set_seed(task.training.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        task.script.model_name_or_path,
        num_labels=len(LABELS),
        problem_type="single_label_classification",  # or the model finds it out in the first step, and is compiled anew
        id2label=dict(enumerate(LABELS)),
        label2id={label: number for number, label in enumerate(LABELS)},
    )
    return trainer(
        model=model,
        args=task.training,
        train_dataset=task.train,
        eval_dataset=task.held_out,
        processing_class=task.tokenizer,
        data_collator=DataCollatorWithPadding(task.tokenizer),
        compute_metrics=accuracy,
    )


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of reviews that were told right."""
    return {"accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())}


def run(script: ScriptArguments, training: Arguments, console: Console) -> None:
    """Train once, or twice to compare, and show what was measured."""
    ort_accel.load_config(training.ort_config)  # a wrong file is refused before anything runs
    task = prepare(script, training)
    console.print(f"{len(task.train)} film reviews to train on, and {len(task.held_out)} others to test with.")
    eager = Trainer if script.compare_eager else None
    train_and_show(lambda kind: build(kind, task), ORTTrainer, eager, console).save_model()


def main() -> int:
    """Exit code 2 means that the configuration or the set-up cannot be used."""
    script, training = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    return exit_code(lambda: run(script, training, Console()))


if __name__ == "__main__":
    sys.exit(main())
