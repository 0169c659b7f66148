"""Train MiniLM to fill in masked words of news articles, on ONNX Runtime, and beside it on eager PyTorch.

python examples/hf/run_mlm.py --compare_eager
python examples/hf/run_mlm.py --mlm_probability 0.3 --num_train_epochs 3
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare import exit_code, train_and_show
from rich.console import Console
from texts import minilm, news
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

import ort_accel
from ort_accel.hf import ORTTrainer, ORTTrainingArguments

CONFIG = Path(__file__).parents[2] / "configs" / "mlm.yaml"
HELD_OUT = 50


@dataclass
class ScriptArguments:
    """The model, its data, and the switch for the comparison."""

    model_name_or_path: str = field(default="", metadata={"help": "A model; empty takes the packaged MiniLM."})
    max_seq_length: int = field(default=128, metadata={"help": "Articles are cut after this many tokens."})
    mlm_probability: float = field(default=0.15, metadata={"help": "The share of the tokens that is masked."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many articles at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on this many articles at most."})
    compare_eager: bool = field(default=False, metadata={"help": "Train on eager PyTorch first, and compare."})


@dataclass
class Arguments(ORTTrainingArguments):
    """All training arguments of transformers, with defaults that suit 250 articles on a small CPU."""

    output_dir: str | None = "out/mlm"
    ort_config: str | None = str(CONFIG)
    use_cpu: bool = True
    num_train_epochs: float = 2.0
    per_device_train_batch_size: int = 16
    learning_rate: float = 1e-4
    logging_steps: float = 10
    save_strategy: str = "no"


def tokenized(script: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Any], list[Any]]:
    """Articles to train on and articles held out, as token ids of different lengths."""
    rows = [tokenizer(text, truncation=True, max_length=script.max_seq_length) for text in news()]
    return rows[HELD_OUT:][: script.max_train_samples], rows[:HELD_OUT][: script.max_eval_samples]


def run(script: ScriptArguments, training: Arguments, console: Console) -> None:
    """Train once, or twice to compare, show what was measured, and save."""
    ort_accel.load_config(training.ort_config)  # a wrong file is refused before anything runs
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path or str(minilm()))
    train, held_out = tokenized(script, tokenizer)
    console.print(f"{len(train)} news articles to train on, {len(held_out)} others held out.")

    def build(kind: type[Trainer]) -> Trainer:
        return trainer_with_a_fresh_model(kind, script, training, tokenizer, train, held_out)

    train_and_show(build, ORTTrainer, Trainer if script.compare_eager else None, console).save_model()


def trainer_with_a_fresh_model(
    kind: type[Trainer],
    script: ScriptArguments,
    training: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    train: list[Any],
    held_out: list[Any],
) -> Trainer:
    """The same seed gives the same head, the same batches, the same masks and the same dropout."""
    set_seed(training.seed)
    return kind(
        model=AutoModelForMaskedLM.from_pretrained(script.model_name_or_path or str(minilm())),
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=script.mlm_probability),
    )


def main() -> int:
    """Read the arguments, then train."""
    script, training = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    return exit_code(lambda: run(script, training, Console()))


if __name__ == "__main__":
    sys.exit(main())
