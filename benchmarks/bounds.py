"""How fast a step could be at most: what its matrix products and attention kernels take alone. See `--help`.

Eager PyTorch and ort_accel train in turns. A second model of ort_accel leaves products and attention to PyTorch, where
the profiler sees them. It computes only what is needed, as the first one does, so that the time of these kernels is a
lower bound of a step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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

from benchmarks.density import CASES as DENSITY_CASES
from ort_accel.cli.benchmark import contenders, machine
from ort_accel.cli.benchmark.contenders import EAGER, ORT_ACCEL, Judge
from ort_accel.cli.benchmark.timing import in_turns
from ort_accel.cli.benchmark.workload import Workload, batch_of, build
from ort_accel.config import load_config

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ATTENTION = ("aten::_scaled_dot_product", "ort_accel::scaled_dot_product")
"""How the names of attention's kernels begin, forward and backward: PyTorch's, and the native library's."""

PROFILED = "ort_accel, profiled"
IN_PYTORCH = {
    "engine": {"run_in_pytorch": [f"{name.replace('::', '.')}.default" for name in PRODUCTS]},
    "compute": {"attention": "fused", "native": False, "fusions": False},
}
"""Let PyTorch run products and attention, where its profiler sees them; it does not see those of a fused head."""

CASES = {
    "bert": Workload("bert", dropout=0.1),
    "llama": Workload("llama", batch=4, length=256, vocab=16_000, kv_heads=2),
    **{name: case.workload for name, case in DENSITY_CASES.items() if name != "full"},
}

TINY = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": None, "batch": 4, "length": 10, "vocab": 40}


@dataclass(frozen=True)
class Bound:
    """Medians of seconds, and what follows from them."""

    eager: float
    ours: float
    products: float
    """The time of the profiled model's matrix products."""
    attention: float

    @property
    def kernels(self) -> float:
        """The time of a step that consists of these kernels alone."""
        return self.products + self.attention


def bounds(
    cases: Annotated[
        list[str] | None, typer.Option("--case", help=f"Only these of {', '.join(CASES)}; give it several times.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 15,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before.")] = 3,
    tiny: Annotated[bool, typer.Option(help="Tiny models, to try the script.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it.")] = None,
) -> None:
    """Measure what the kernels of a step take. The exit code is 1 if a step was wrong."""
    if unknown := set(cases or ()) - CASES.keys():
        raise typer.BadParameter(f"{', '.join(unknown)}: unknown; allowed: {', '.join(CASES)}", param_hint="--case")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "eager, ms", "ort_accel", "products", "attention", "speed of eager", "at most", "of the bound"):
        table.add_column(heading, justify="right" if heading else "left")
    found = {}
    for name in cases or CASES:
        workload = CASES[name]
        size = Workload(**{**asdict(workload), **TINY}) if tiny else workload
        bound = measured(size, steps, warmup)
        found[name] = {**asdict(bound), "kernels": bound.kernels, "workload": asdict(size)}
        milliseconds = (f"{1e3 * value:.1f}" for value in (bound.eager, bound.ours, bound.products, bound.attention))
        pairs = (bound.eager, bound.ours), (bound.eager, bound.kernels), (bound.ours, bound.kernels)
        table.add_row(name, *milliseconds, *(f"{one / other:.2f}x" for one, other in pairs))
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    facts = machine.facts(torch.get_num_threads())
    console.print(machine.in_short(facts))
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, **found}, indent=1) + "\n", encoding="utf-8")


def measured(workload: Workload, steps: int, warmup: int) -> Bound:
    """Steps of eager PyTorch, of ort_accel as it comes, and of the profiled model, in turns."""
    models = {name: build(workload) for name in (EAGER, ORT_ACCEL, PROFILED)}
    judge = Judge(models[EAGER], batch_of(workload), workload.precision)
    for name, settings in ((ORT_ACCEL, None), (PROFILED, IN_PYTORCH)):
        contenders.prepare(ORT_ACCEL, models[name], load_config(settings))
        if fault := judge.fault(models[name]):
            raise SystemExit(f"{workload}: {fault}")
    inside: list[tuple[float, float]] = []
    batches = [batch_of(workload, number) for number in range(warmup + steps)]

    def steps_of(model: nn.Module) -> partial[None]:
        return partial(contenders.next_step, model, iter(batches), workload.precision)

    runs = {name: steps_of(models[name]) for name in (EAGER, ORT_ACCEL)}
    profiled = steps_of(models[PROFILED])
    seconds = in_turns({**runs, PROFILED: lambda: inside.append(_kernels(profiled))}, steps, warmup)
    products, attention = zip(*inside[warmup:], strict=True)
    eager, ours = (median(seconds[name]) for name in (EAGER, ORT_ACCEL))
    return Bound(eager, ours, median(products), median(attention))


def _kernels(run: partial[None]) -> tuple[float, float]:
    """Seconds of a step in products, and in attention's kernels."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    events = seen.key_averages()
    products = sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS)
    attention = sum(event.self_cpu_time_total for event in events if event.key.startswith(ATTENTION))
    return products / 1e6, attention / 1e6


if __name__ == "__main__":
    typer.run(bounds)
