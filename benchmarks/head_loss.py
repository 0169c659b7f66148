"""A language model's head with its loss: eager PyTorch and ort_accel, in time and in memory. See `--help`.

A step is forward and backward, to the hidden states and to the head's weight. The contenders take turns on the same
batches; the peak memory is that of a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

import ort_accel
from ort_accel.cli.benchmark import machine
from ort_accel.cli.benchmark.contenders import EAGER, ORT_ACCEL
from ort_accel.cli.benchmark.timing import compare, in_turns, summary
from ort_accel.memory.malloc_settings import trim_heap
from ort_accel.memory.process_memory import reset_high_water_mark, resident

QUIET = {"engine": {"fallback": "report", "compare_with_eager": False}, "observe": {"log_level": "error"}}
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """The head and its batches."""

    vocab: int
    rows: int
    hidden: int
    labelled: float
    bf16: bool
    frozen: bool


class Head(nn.Module):
    """A head with its loss over rows of hidden states."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        self.head.requires_grad_(not size.frozen)
        self.to(torch.bfloat16 if size.bf16 else torch.float32)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of the labels that are not ignored."""
        return functional.cross_entropy(self.head(hidden).float(), labels)


class Running:
    """A head that is asked for one step after another."""

    def __init__(self, name: str, size: Size) -> None:
        self.model, self._batches = Head(size), batches(size)
        self.found: list[Tensor] = []
        if name == ORT_ACCEL:
            ort_accel.accelerate(self.model, QUIET)

    def step(self) -> None:
        """Compute the loss of the next batch, and its gradients."""
        self.found = []
        self.model.zero_grad()
        hidden, labels = next(self._batches)
        loss = self.model(hidden, labels)
        loss.backward()
        weight = self.model.head.weight.grad
        self.found = [loss.detach(), hidden.grad, *([] if weight is None else [weight])]


def batches(size: Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields hidden states, and labels of which a share is not ignored."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if size.bf16 else torch.float32
    while True:
        hidden = torch.randn(size.rows, size.hidden, generator=generator).to(dtype).requires_grad_()
        labels = torch.randint(0, size.vocab, (size.rows,), generator=generator)
        ignored = torch.rand(size.rows, generator=generator) >= size.labelled
        yield hidden, labels.masked_fill(ignored, -100)


def head_loss(
    vocab: Annotated[int, typer.Option(min=1024)] = 152_000,
    rows: Annotated[int, typer.Option(min=1)] = 4096,
    hidden: Annotated[int, typer.Option(min=1)] = 512,
    labelled: Annotated[float, typer.Option(min=0, max=1, help="The share of rows with a label.")] = 1.0,
    bf16: Annotated[bool, typer.Option(help="Weights and hidden states; fp32 without it.")] = False,
    frozen: Annotated[bool, typer.Option(help="The weight has no gradient, as with LoRA.")] = False,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds that count.")] = 5,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds before.")] = 1,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Measure a head with its loss in eager PyTorch and on ort_accel."""
    size = Size(vocab, rows, hidden, labelled, bf16, frozen)
    found: dict[str, Any] = {"machine": machine.facts(torch.get_num_threads()), "size": asdict(size)}
    found["peak_mib"] = {name: _alone(name, size) for name in (EAGER, ORT_ACCEL)}
    typer.echo(f"peak MiB: {found['peak_mib']}")
    running = {name: Running(name, size) for name in (EAGER, ORT_ACCEL)}
    seconds = in_turns({name: one.step for name, one in running.items()}, rounds, warmup)
    found["seconds"] = {name: summary(times).to_dict() for name, times in seconds.items()}
    found["ratio"] = compare(seconds[EAGER], seconds[ORT_ACCEL]).to_dict()
    found["differences"] = [
        _difference(one, other) for one, other in zip(running[ORT_ACCEL].found, running[EAGER].found, strict=True)
    ]
    found["fused"] = ort_accel.report(running[ORT_ACCEL].model).counters["fused heads"]
    found["machine"]["load_after"] = machine.load()
    _show(found)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _difference(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference, in terms of the largest number."""
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())


def _alone(name: str, size: Size) -> float:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(peak_of, name, size).result()


def peak_of(name: str, size: Size) -> float:
    """Returns by how many MiB a step adds at most to what a process holds before it, gradients not among them."""
    running = Running(name, size)
    running.step()
    running.found = []
    running.model.zero_grad()
    trim_heap()
    before = resident() or 0
    reset_high_water_mark()
    running.step()
    return ((resident("VmHWM") or 0) - before) / MIB


def _show(found: dict[str, Any]) -> None:
    ratio, peaks = found["ratio"], found["peak_mib"]
    medians = {name: times["median"] for name, times in found["seconds"].items()}
    typer.echo(", ".join(f"{name} {median:.2f} s" for name, median in medians.items()))
    typer.echo(f"{EAGER} / {ORT_ACCEL} {ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})")
    typer.echo(f"memory: {peaks[ORT_ACCEL] / peaks[EAGER]:.1%} of eager's")
    typer.echo(f"loss and gradients within {', '.join(f'{item:.1e}' for item in found['differences'])}")
    typer.echo(machine.in_short(found["machine"]))


if __name__ == "__main__":
    typer.run(head_loss)
