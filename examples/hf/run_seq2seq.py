"""Train a small T5 from scratch to write the opening of a news article from the rest of it, on ONNX Runtime.

python examples/hf/run_seq2seq.py --compare_eager
python examples/hf/run_seq2seq.py --predict_with_generate --generation_max_length 32
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
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

import ort_accel
from ort_accel.hf import ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments

CONFIG = Path(__file__).parents[2] / "configs" / "default.yaml"
HELD_OUT = 50


@dataclass
class ScriptArguments:
    """How large the model is, what it reads and writes, and whether to compare."""

    tokenizer_name: str = field(default="", metadata={"help": "A tokenizer; empty takes the packaged MiniLM's."})
    d_model: int = field(default=192, metadata={"help": "The width of the model."})
    num_layers: int = field(default=2, metadata={"help": "How many layers encoder and decoder have."})
    max_source_length: int = field(default=128, metadata={"help": "Articles are cut after this many tokens."})
    max_target_length: int = field(default=32, metadata={"help": "Openings are cut after this many tokens."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many articles at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on this many articles at most."})
    compare_eager: bool = field(default=False, metadata={"help": "Train on eager PyTorch first, and compare."})


@dataclass
class Arguments(ORTSeq2SeqTrainingArguments):
    """All training arguments of transformers, with defaults that suit 250 articles on a small CPU."""

    output_dir: str | None = "out/seq2seq"
    ort_config: str | None = str(CONFIG)
    use_cpu: bool = True
    num_train_epochs: float = 1.0
    per_device_train_batch_size: int = 8
    learning_rate: float = 1e-3
    logging_steps: float = 10
    save_strategy: str = "no"


def tokenized(script: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Any], list[Any]]:
    """Articles without their first sentence, and as labels that sentence."""
    rows = []
    for opening, dot, rest in (article.partition(". ") for article in news()):
        row = tokenizer(rest or opening, truncation=True, max_length=script.max_source_length)
        target = tokenizer(opening + dot, truncation=True, max_length=script.max_target_length)
        rows.append(
            {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"], "labels": target["input_ids"]}
        )
    return rows[HELD_OUT:][: script.max_train_samples], rows[:HELD_OUT][: script.max_eval_samples]


def t5(script: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> T5ForConditionalGeneration:
    """A T5 with random weights."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=script.d_model,
        d_kv=32,
        d_ff=script.d_model * 4,
        num_layers=script.num_layers,
        num_heads=script.d_model // 32,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.sep_token_id,
        decoder_start_token_id=tokenizer.cls_token_id,
    )
    return T5ForConditionalGeneration(config)


def run(script: ScriptArguments, training: Arguments, console: Console) -> None:
    """Train once, or twice to compare, show what was measured, and save."""
    ort_accel.load_config(training.ort_config)  # a wrong file is refused before anything runs
    tokenizer = AutoTokenizer.from_pretrained(script.tokenizer_name or str(minilm()))
    train, held_out = tokenized(script, tokenizer)
    console.print(f"{len(train)} news articles to train on, {len(held_out)} others held out.")

    def build(kind: type[Seq2SeqTrainer]) -> Seq2SeqTrainer:
        return trainer_with_a_fresh_model(kind, script, training, tokenizer, train, held_out)

    trainer = train_and_show(build, ORTSeq2SeqTrainer, Seq2SeqTrainer if script.compare_eager else None, console)
    trainer.save_model()
    if training.predict_with_generate:
        ids = trainer.predict(held_out[:1]).predictions.clip(min=0)
        console.print("An opening it writes:", tokenizer.decode(ids[0], skip_special_tokens=True))


def trainer_with_a_fresh_model(
    kind: type[Seq2SeqTrainer],
    script: ScriptArguments,
    training: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    train: list[Any],
    held_out: list[Any],
) -> Seq2SeqTrainer:
    """The same seed gives the same weights, the same batches and the same dropout."""
    set_seed(training.seed)
    model = t5(script, tokenizer)
    return kind(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
    )


def main() -> int:
    """Read the arguments, then train."""
    script, training = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    return exit_code(lambda: run(script, training, Console()))


if __name__ == "__main__":
    sys.exit(main())
