"""LoRA training steps in eager PyTorch and on ort_accel, dense and padded: a MiniLM and a Llama. See `--help`.

A step is forward, backward and AdamW on the adapter's weights. Models have random weights; nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import ort_accel
from ort_accel.cli.benchmark import machine
from ort_accel.cli.benchmark.contenders import EAGER, ORT_ACCEL
from ort_accel.cli.benchmark.timing import compare, in_turns, summary

QUIET = {"engine": {"fallback": "report", "compare_with_eager": False}, "observe": {"log_level": "error"}}
SPREAD = (0.6, 0.9, 1.1, 1.4)
"""The lengths of the texts of a batch, in multiples of their mean."""

Batch = dict[str, Tensor]


class Kind(StrEnum):
    """A model with its adapter."""

    MINILM = "minilm"
    LLAMA = "llama"


def adapted(kind: Kind) -> PeftModel:
    """Returns a model of six layers of 384 with LoRA on queries and values."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    if kind is Kind.MINILM:
        bert = BertConfig(**sizes, intermediate_size=1536, vocab_size=30_522)
        targets, task = ["query", "value"], "SEQ_CLS"
        return get_peft_model(BertForSequenceClassification(bert), _lora(targets, task)).train()
    llama = LlamaConfig(**sizes, num_key_value_heads=4, intermediate_size=1024, vocab_size=8000, use_cache=False)
    return get_peft_model(LlamaForCausalLM(llama), _lora(["q_proj", "v_proj"], "CAUSAL_LM")).train()


def _lora(targets: list[str], task: str) -> LoraConfig:
    return LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type=task)


def batches(kind: Kind, valid: float) -> Iterator[Batch]:
    """Yields batches of texts of different lengths; without padding if all tokens are valid."""
    generator = torch.Generator().manual_seed(0)
    rows, length = (8, 128) if kind is Kind.MINILM else (4, 256)
    while True:
        ids = torch.randint(0, 8000, (rows, length), generator=generator)
        shares = torch.tensor([valid * SPREAD[row % len(SPREAD)] for row in range(rows)])
        lengths = torch.full((rows,), length) if valid == 1 else (shares * length).round().clamp(1, length)
        mask = (torch.arange(length) < lengths[:, None]).long()
        of_tokens, of_texts = ids.masked_fill(mask == 0, -100), torch.randint(0, 2, (rows,), generator=generator)
        yield {"input_ids": ids, "attention_mask": mask, "labels": of_texts if kind is Kind.MINILM else of_tokens}


class Running:
    """A model that is asked for one step after another."""

    def __init__(self, name: str, kind: Kind, valid: float) -> None:
        self.model, self.losses, self._batches = adapted(kind), list[float](), batches(kind, valid)
        self._optimizer = torch.optim.AdamW([one for one in self.model.parameters() if one.requires_grad], lr=1e-3)
        if name == ORT_ACCEL:
            ort_accel.accelerate(self.model, QUIET)

    def step(self) -> None:
        """Train on the next batch."""
        torch.manual_seed(len(self.losses))
        loss = self.model(**next(self._batches)).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


def lora(
    kind: Annotated[Kind, typer.Option(help="The model.")] = Kind.MINILM,
    valid: Annotated[float, typer.Option(min=0.05, max=1, help="The share of tokens that are not padding.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds that count.")] = 15,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds before.")] = 4,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Measure LoRA steps in eager PyTorch and on ort_accel."""
    found: dict[str, Any] = {"machine": machine.facts(torch.get_num_threads()), "model": kind, "valid": valid}
    running = {name: Running(name, kind, valid) for name in (EAGER, ORT_ACCEL)}
    seconds = in_turns({name: one.step for name, one in running.items()}, rounds, warmup)
    found["seconds"] = {name: summary(times).to_dict() for name, times in seconds.items()}
    found["ratio"] = compare(seconds[EAGER], seconds[ORT_ACCEL]).to_dict()
    pairs = zip(*(one.losses for one in running.values()), strict=True)
    found["largest difference of losses"] = max(abs(one - other) for one, other in pairs)
    found["machine"]["load_after"] = machine.load()
    medians = ", ".join(f"{name} {1e3 * times['median']:.0f} ms" for name, times in found["seconds"].items())
    ratio = found["ratio"]
    typer.echo(f"{medians}: {ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})")
    typer.echo(f"losses within {found['largest difference of losses']:.1e}; {machine.in_short(found['machine'])}")
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(lora)
