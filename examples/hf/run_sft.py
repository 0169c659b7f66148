"""Teach a small Llama to go on with news articles, by TRL's SFTTrainer, on ONNX Runtime and on eager PyTorch.

python examples/hf/run_sft.py --compare_eager
python examples/hf/run_sft.py --prompt_words 120 --loss_type dft
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import run_clm as clm
from compare import exit_code, train_and_show
from datasets import Dataset
from rich.console import Console
from texts import every_tenth_apart, minilm, news
from transformers import AutoTokenizer, HfArgumentParser, PreTrainedTokenizerBase, Trainer, set_seed
from trl import SFTConfig, SFTTrainer

import ort_accel
from ort_accel.hf import ORTAccelCallback, ORTTrainer

CONFIG = Path(__file__).parents[2] / "configs" / "default.yaml"


@dataclass
class ScriptArguments(clm.ScriptArguments):
    """How large the model is, what it reads, and whether to compare."""

    prompt_words: int = field(default=60, metadata={"help": "How an article begins: so many words, not trained on."})
    answer_words: int = field(default=60, metadata={"help": "How it goes on: so many words at most."})
    ort_config: str = field(default=str(CONFIG), metadata={"help": "The configuration of ort_accel."})


@dataclass
class Arguments(SFTConfig):
    """All arguments of TRL's trainer, with defaults that suit a small CPU."""

    output_dir: str | None = "out/sft"
    use_cpu: bool = True
    bf16: bool | None = False
    gradient_checkpointing: bool = False
    num_train_epochs: float = 1.0
    per_device_train_batch_size: int = 8
    learning_rate: float = 1e-3
    logging_steps: float = 10
    save_strategy: str = "no"


def articles(script: ScriptArguments) -> tuple[Dataset, Dataset]:
    """Beginnings of different lengths, and what follows them; every tenth article is held out."""
    rows = []
    for number, text in enumerate(news()):
        words = text.split()
        begin = script.prompt_words // 3 + number * 7 % max(script.prompt_words * 2 // 3, 1)
        answer = words[begin : begin + script.answer_words - number * 11 % max(script.answer_words // 2, 1)]
        if answer:
            rows.append({"prompt": " ".join(words[:begin]), "completion": " " + " ".join(answer)})
    train, held_out = every_tenth_apart(rows)
    return Dataset.from_list(train[: script.max_train_samples]), Dataset.from_list(held_out[: script.max_eval_samples])


def run(script: ScriptArguments, training: Arguments, console: Console) -> None:
    """Train once, or twice to compare, show what was measured, and save."""
    ort_accel.load_config(script.ort_config)  # a wrong file is refused before anything runs
    tokenizer = AutoTokenizer.from_pretrained(script.tokenizer_name or str(minilm()))
    tokenizer.eos_token = tokenizer.sep_token
    train, held_out = articles(script)
    console.print(f"{len(train)} articles to train on, {len(held_out)} others held out.")

    def build(kind: type[Trainer]) -> Trainer:
        callbacks = [ORTAccelCallback(script.ort_config)] if kind is ORTTrainer else []
        return trainer_with_a_fresh_model(script, training, tokenizer, train, held_out, callbacks)

    train_and_show(build, ORTTrainer, Trainer if script.compare_eager else None, console).save_model()


def trainer_with_a_fresh_model(
    script: ScriptArguments,
    training: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset,
    held_out: Dataset,
    callbacks: list[ORTAccelCallback],
) -> SFTTrainer:
    """The same seed gives the same weights and the same batches."""
    set_seed(training.seed)
    return SFTTrainer(
        model=clm.llama(script, tokenizer),
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def main() -> int:
    """Read the arguments, then train."""
    script, training = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    return exit_code(lambda: run(script, training, Console()))


if __name__ == "__main__":
    sys.exit(main())
