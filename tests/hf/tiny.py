"""Tiny models, padded batches and trainers for the tests of this room."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from ort_accel.hf import ORTAccelCallback, ORTTrainer

ROOT = Path(__file__).parents[2]


class ReviewerConfig(PreTrainedConfig):
    model_type = "reviewer"
    initializer_range = 0.5


class Reviewer(PreTrainedModel):
    """A classifier of padded rows of tokens, for tests in which the kind of model does not matter."""

    config_class = ReviewerConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(32, 16)
        self.dense, self.dropout = nn.Linear(16, 16), nn.Dropout(0.1)
        self.classifier = nn.Linear(16, 2)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.dropout(torch.tanh(self.dense(self.embedding(input_ids))))
        kept = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).unsqueeze(-1)
        logits = self.classifier((hidden * kept).sum(1) / kept.sum(1))
        return SequenceClassifierOutput(None if labels is None else F.cross_entropy(logits, labels), logits)


def reviewer():
    return Reviewer(ReviewerConfig())


def bert(**more):
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**{**sizes, "intermediate_size": 32, "num_labels": 2, **more}))


def llama(**more):
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "intermediate_size": 64, **ids, **more}))


def t5(**more):
    sizes = {"vocab_size": 32, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**{**sizes, "decoder_start_token_id": 0, **more}))


def reviews(rows=16, length=8):
    """Rows of token ids, each second one with padding, and two classes."""
    ids = torch.randint(3, 32, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1::2, length // 2 :] = 0
    return [
        {"input_ids": row * kept, "attention_mask": kept, "labels": int(row[0]) % 2}
        for row, kept in zip(ids, mask, strict=True)
    ]


def texts(rows=16, length=8):
    """The same rows, to be continued."""
    data = [{**row, "labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)} for row in reviews()]
    return data[:rows]


def arguments(folder, kind=TrainingArguments, **more):
    usual = {"use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    return kind(str(folder), **{**usual, "max_steps": 4, "per_device_train_batch_size": 4, **more})


class Listener(TrainerCallback):
    """Keeps the lines of the log as loggers get them."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs, **more):
        self.lines.append({**logs, "step": state.global_step})


def logged(trainer):
    """The training log's lines as loggers got them."""
    listener = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Listener))
    return [line for line in listener.lines if "loss" in line]


def make(side, model, args, config=None, **more):
    """A trainer of one of the three sides that are compared: eager, ORTTrainer, callback."""
    data = {"train_dataset": reviews(), "eval_dataset": reviews(8), **more}
    callbacks = [Listener(), *data.pop("callbacks", []), *([ORTAccelCallback(config)] if side == "callback" else [])]
    if side == "ORTTrainer":
        return ORTTrainer(model, args, ort_config=config, callbacks=callbacks, **data)
    return Trainer(model, args, callbacks=callbacks, **data)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(side, folder, build=reviewer, seed=3, resume=None, **more):
    """Train from a seed, with a fresh model; returns the trainer."""
    named = {key: more.pop(key) for key in list(more) if key in TRAINER_KEYS}
    set_seed(seed)
    trainer = make(side, None if "model_init" in named else build(), arguments(folder, seed=seed, **more), **named)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


TRAINER_KEYS = ("train_dataset", "eval_dataset", "callbacks", "compute_loss_func", "model_init", "config")


def in_python(code, *words):
    """Start a program of a few lines in a process of its own, with this folder's modules at hand."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
