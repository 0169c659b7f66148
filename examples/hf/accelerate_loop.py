"""A training loop of one's own with Accelerate, on ONNX Runtime, and beside it on eager PyTorch.

python examples/hf/accelerate_loop.py --compare_eager
accelerate launch --num_processes 1 examples/hf/accelerate_loop.py --num_train_epochs 3
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from compare import Outcome, PeakMemory, exit_code, show_results
from rich.console import Console
from run_classification import CONFIG
from texts import LABELS, film_reviews, minilm, split
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, HfArgumentParser

import ort_accel
from ort_accel.hf import ORTAccelPlugin


@dataclass
class Arguments:
    """The model, the settings of its fine-tuning, and the switch for the comparison."""

    model_name_or_path: str = field(default="", metadata={"help": "A model; empty takes the packaged MiniLM."})
    ort_config: str = field(default=str(CONFIG), metadata={"help": "The YAML file that sets up ort_accel."})
    max_seq_length: int = field(default=128, metadata={"help": "Reviews are cut after this many tokens."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Reviews in a batch of a process."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches between two optimizer steps."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Of AdamW."})
    num_train_epochs: int = field(default=4, metadata={"help": "How often every review is seen."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many reviews at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on this many reviews at most."})
    cpu: bool = field(default=False, metadata={"help": "Train on the CPU, even where there is a GPU."})
    seed: int = field(default=42, metadata={"help": "Of weights, batches and dropout."})
    compare_eager: bool = field(default=False, metadata={"help": "Train on eager PyTorch first, and compare."})


def loaders(args: Arguments) -> tuple[DataLoader, DataLoader]:
    """Padded batches to train on, and to evaluate on."""
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path or str(minilm()))

    def rows(reviews: list, most: int | None) -> list[dict]:
        cut = {"truncation": True, "max_length": args.max_seq_length}
        return [{**tokenizer(review.text, **cut), "label": review.label} for review in reviews[:most]]

    train, held_out = split(film_reviews(), 0.3, args.seed)
    size = {"batch_size": args.per_device_train_batch_size, "collate_fn": DataCollatorWithPadding(tokenizer)}
    return (
        DataLoader(rows(train, args.max_train_samples), shuffle=True, **size),
        DataLoader(rows(held_out, args.max_eval_samples), **size),
    )


def train(
    args: Arguments, accelerator: Accelerator, name: str, on_onnxruntime: bool
) -> tuple[Outcome, torch.nn.Module]:
    """The loop. Nothing in it is about ONNX Runtime but the line that takes the eager model off it again."""
    set_seed(args.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model_name_or_path or str(minilm()), num_labels=len(LABELS), problem_type="single_label_classification"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    train_batches, eval_batches = loaders(args)
    prepared, optimizer, train_batches, eval_batches = accelerator.prepare(
        model, optimizer, train_batches, eval_batches
    )
    if not on_onnxruntime:
        ort_accel.restore(accelerator.unwrap_model(prepared))
    prepared.train()
    steps: list[tuple[int, float]] = []
    with PeakMemory() as memory:
        begin = time.perf_counter()
        for _ in range(args.num_train_epochs):
            for batch in train_batches:
                step_begin = time.perf_counter()
                with accelerator.accumulate(prepared):
                    loss = prepared(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                steps.append((int(batch["attention_mask"].sum()), time.perf_counter() - step_begin))
        wall_time = time.perf_counter() - begin
    eval_loss, accuracy = evaluate(accelerator, prepared, eval_batches)
    model = accelerator.unwrap_model(prepared)
    set_up = ort_accel.report(model).set_up_seconds if on_onnxruntime else 0.0
    outcome = Outcome(name, loss.item(), eval_loss, accuracy, steps, memory.growth, wall_time, set_up)
    accelerator.free_memory()
    return outcome, model


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, batches: DataLoader) -> tuple[float, float]:
    """Mean loss, and the share of reviews that were told right, over all processes."""
    model.eval()
    losses, right = [], []
    for batch in batches:
        outputs = model(**batch)
        found, labels = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(len(batch["labels"]))))
        right.append(found == labels)
    return torch.cat(losses).mean().item(), torch.cat(right).float().mean().item()


def run(args: Arguments, console: Console) -> None:
    """Train once, or twice to compare, and show what was measured."""
    accelerator = Accelerator(
        cpu=args.cpu,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dynamo_plugin=ORTAccelPlugin(args.ort_config),
    )
    outcomes = [train(args, accelerator, "eager PyTorch", on_onnxruntime=False)[0]] if args.compare_eager else []
    outcome, model = train(args, accelerator, "ort_accel", on_onnxruntime=True)
    show_results(console, [*outcomes, outcome], ort_accel.report(model))


def main() -> int:
    """Read the arguments, then train."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    return exit_code(lambda: run(args, Console()))


if __name__ == "__main__":
    sys.exit(main())
