"""How fast a step could be at most: what its matrix products and attention kernels take alone. See `--help`.

Both take attention from the same library here, and ort_accel its products from the faster of two. What lies between
these kernels is what an engine can save, so that the time of the kernels in its own step, which only computes what is
needed, bounds how many times faster than eager it can get on this machine, unless ONNX Runtime has faster ones.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ort_accel.cli.benchmark import contenders, machine
from ort_accel.cli.benchmark.contenders import EAGER, ORT_ACCEL, Judge
from ort_accel.cli.benchmark.timing import in_turns
from ort_accel.cli.benchmark.workload import Workload, batch_of, build
from ort_accel.config import load_config

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
BY_ONEDNN = "mkldnn::_linear_pointwise"
"""The products that a node may ask for, and what may run them in place of its operator."""
ATTENTION = ("aten::_scaled_dot_product", "ort_accel::scaled_dot_product")
"""How the names of attention's kernels begin, forward and backward: PyTorch's, and the native library's."""

IN_PYTORCH = {
    "engine": {"run_in_pytorch": [f"{name.replace('::', '.')}.default" for name in PRODUCTS]},
    "compute": {"attention": "fused", "native": False},
}
"""Let PyTorch run products and attention, where its profiler sees them."""


@dataclass(frozen=True)
class Case:
    """What is measured, and how many times as fast as eager it was asked to be."""

    workload: Workload
    asked: float


class Name(StrEnum):
    """The cases, those of step.py and of density.py."""

    BERT = "bert"
    LLAMA = "llama"
    CLASSIFICATION = "classification"
    CAUSAL = "causal"
    MLM = "mlm"


CASES = {
    Name.BERT: Case(Workload("bert"), 1.8),
    Name.LLAMA: Case(Workload("llama", batch=4, length=256, vocab=16_000, kv_heads=2), 1.6),
    Name.CLASSIFICATION: Case(Workload("bert", density=0.35), 3.5),
    Name.CAUSAL: Case(Workload("llama", batch=4, length=256, vocab=16_000, density=0.6, labelled=0.3), 2.5),
    Name.MLM: Case(Workload("bert-mlm", vocab=30_522, labelled=0.14), 3.0),
}

TINY = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": None, "batch": 4, "length": 10, "vocab": 40}


@dataclass(frozen=True)
class Bound:
    """Medians of seconds, and what follows from them."""

    eager: float
    ours: float
    products: float
    """Of our step, in matrix products."""
    attention: float
    asked: float

    @property
    def most(self) -> float:
        """How many times as fast as eager a step would be that consists of these kernels alone."""
        return self.eager / (self.products + self.attention)

    @property
    def verdict(self) -> str:
        """What that says of what was asked."""
        if self.eager / self.ours >= self.asked:
            return "met"
        return "out of reach" if self.most < self.asked else "open"


def bounds(
    cases: Annotated[list[Name] | None, typer.Option("--case", help="Only these; give it several times.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 15,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before.")] = 3,
    tiny: Annotated[bool, typer.Option(help="Tiny models, to try the script.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it.")] = None,
) -> None:
    """Measure what the kernels of a step take. The exit code is 1 if a step was wrong."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "eager, ms", "ort_accel", "its products", "its attention", "now", "at most", "asked", ""):
        table.add_column(heading, justify="right" if heading else "left")
    found = {}
    for name in cases or list(Name):
        case = CASES[name]
        size = Workload(**{**asdict(case.workload), **TINY}) if tiny else case.workload
        bound = measured(size, case.asked, steps, warmup)
        found[name.value] = {**asdict(bound), "most": bound.most, "verdict": bound.verdict, "workload": asdict(size)}
        milliseconds = (f"{1e3 * value:.1f}" for value in (bound.eager, bound.ours, bound.products, bound.attention))
        ratios = (f"{value:.2f}x" for value in (bound.eager / bound.ours, bound.most, bound.asked))
        table.add_row(name.value, *milliseconds, *ratios, bound.verdict)
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    facts = machine.facts(torch.get_num_threads())
    console.print(machine.in_short(facts))
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, **found}, indent=1) + "\n", encoding="utf-8")


def measured(workload: Workload, asked: float, steps: int, warmup: int) -> Bound:
    """Steps of both in turns, and after each of ours one more, to see into."""
    models = {name: build(workload) for name in (EAGER, ORT_ACCEL)}
    judge = Judge(models[EAGER], batch_of(workload), workload.precision)
    contenders.prepare(ORT_ACCEL, models[ORT_ACCEL], load_config(IN_PYTORCH))
    if fault := judge.fault(models[ORT_ACCEL]):
        raise SystemExit(f"{workload}: {fault}")
    inside: list[tuple[float, float]] = []
    batches = [batch_of(workload, number) for number in range(warmup + steps)]

    def steps_of(model: nn.Module) -> partial[None]:
        return partial(contenders.next_step, model, iter(batches), workload.precision)

    runs, again = {name: steps_of(model) for name, model in models.items()}, steps_of(models[ORT_ACCEL])
    looked = {"kernels": lambda: inside.append(_kernels(again))}
    seconds = in_turns({**runs, **looked}, steps, warmup)
    products, attention = zip(*inside[warmup:], strict=True)
    eager, ours = (median(seconds[name]) for name in (EAGER, ORT_ACCEL))
    return Bound(eager, ours, median(products), median(attention), asked)


def _kernels(run: partial[None]) -> tuple[float, float]:
    """Seconds of a step in products, and in attention's kernels."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    events = seen.key_averages()
    products = sum(event.self_cpu_time_total for event in events if event.key in (*PRODUCTS, BY_ONEDNN))
    attention = sum(event.self_cpu_time_total for event in events if event.key.startswith(ATTENTION))
    return products / 1e6, attention / 1e6


if __name__ == "__main__":
    typer.run(bounds)
