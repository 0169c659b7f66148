"""The training arguments of transformers with one more: ort_accel's YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from ort_accel.hf.optimizer import AcceptsFusedAdam


@dataclass
class _ConfigArgument(AcceptsFusedAdam):
    ort_config: str | None = field(
        default=None,
        metadata={"help": "The YAML file that sets up ort_accel. Without one, everything is at its default."},
    )


@dataclass
class ORTTrainingArguments(_ConfigArgument, TrainingArguments):
    """`transformers.TrainingArguments` with `ort_config`, so that `HfArgumentParser` scripts get `--ort_config`."""


@dataclass
class ORTSeq2SeqTrainingArguments(_ConfigArgument, Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` with `ort_config`."""
