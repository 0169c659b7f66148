"""Train a small Llama from scratch on news articles, on ONNX Runtime, and beside it on eager PyTorch.

python examples/hf/run_clm.py --compare_eager
python examples/hf/run_clm.py --block_size 256 --num_hidden_layers 6 --hidden_size 384
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from compare import exit_code, train_and_show
from rich.console import Console
from texts import every_tenth_apart, minilm, news
from transformers import (
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Trainer,
    default_data_collator,
    set_seed,
)

import ort_accel
from ort_accel.hf import ORTTrainer, ORTTrainingArguments

CONFIG = Path(__file__).parents[2] / "configs" / "causal-lm.yaml"


@dataclass
class ScriptArguments:
    """How large the model is, what it reads, and whether to compare."""

    tokenizer_name: str = field(default="", metadata={"help": "A tokenizer; empty takes the packaged MiniLM's."})
    hidden_size: int = field(default=192, metadata={"help": "The width of the model."})
    num_hidden_layers: int = field(default=3, metadata={"help": "How many layers it has."})
    block_size: int = field(default=128, metadata={"help": "The articles are joined and cut into this many tokens."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many blocks at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on this many blocks at most."})
    compare_eager: bool = field(default=False, metadata={"help": "Train on eager PyTorch first, and compare."})


@dataclass
class Arguments(ORTTrainingArguments):
    """All training arguments of transformers, with defaults that suit a small CPU."""

    output_dir: str | None = "out/clm"
    ort_config: str | None = str(CONFIG)
    use_cpu: bool = True
    num_train_epochs: float = 1.0
    per_device_train_batch_size: int = 8
    learning_rate: float = 1e-3
    logging_steps: float = 10
    save_strategy: str = "no"


def blocks(script: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Any], list[Any]]:
    """All articles behind one another, cut into blocks of one length; every tenth block is held out."""
    ids = list(chain.from_iterable(tokenizer(text, verbose=False)["input_ids"] for text in news()))
    starts = range(0, len(ids) - script.block_size + 1, script.block_size)
    rows = [{"input_ids": ids[at : at + script.block_size]} for at in starts]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    train, held_out = every_tenth_apart(rows)
    return train[: script.max_train_samples], held_out[: script.max_eval_samples]


def llama(script: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A Llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=script.hidden_size,
        intermediate_size=-(-script.hidden_size * 8 // 192) * 64,
        num_hidden_layers=script.num_hidden_layers,
        num_attention_heads=script.hidden_size // 32,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def run(script: ScriptArguments, training: Arguments, console: Console) -> None:
    """Train once, or twice to compare, show what was measured, and save."""
    ort_accel.load_config(training.ort_config)  # a wrong file is refused before anything runs
    tokenizer = AutoTokenizer.from_pretrained(script.tokenizer_name or str(minilm()))
    train, held_out = blocks(script, tokenizer)
    console.print(f"{len(train)} blocks of text to train on, {len(held_out)} others held out.")

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
    """The same seed gives the same weights and the same batches."""
    set_seed(training.seed)
    return kind(
        model=llama(script, tokenizer),
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )


def main() -> int:
    """Read the arguments, then train."""
    script, training = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    return exit_code(lambda: run(script, training, Console()))


if __name__ == "__main__":
    sys.exit(main())
