"""The peak memory and the time of a training step: eager PyTorch, with checkpointing, and ort_accel. See `--help`."""

from __future__ import annotations

import json
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import nn

import ort_accel
from ort_accel.cli.benchmark import contenders, machine
from ort_accel.cli.benchmark.contenders import EAGER
from ort_accel.cli.benchmark.workload import Batch, Workload, batch_of, build
from ort_accel.errors import OrtAccelError
from ort_accel.observe.process_memory import reset_peak, resident, return_free_memory
from ort_accel.runtime.pool import release_unused

CHECKPOINTING = "eager, checkpointing"
MIB = 2**20

CASES = {
    "small": Workload("bert", dropout=0.1),
    "bert": Workload("bert", hidden=768, layers=12, heads=12, batch=8, length=256, vocab=30_522),
    "llama": Workload("llama", hidden=768, layers=8, heads=12, batch=2, length=1024, vocab=16_000),
}
SMALLER = {"hidden": 32, "layers": 2, "heads": 2, "batch": 16, "length": 16, "vocab": 64, "dropout": 0.1}


@dataclass(frozen=True)
class Way:
    """One way to run a step; without `memory` it is eager PyTorch."""

    name: str
    memory: dict[str, Any] | None = None

    def prepare(self, model: nn.Module) -> None:
        """Let a model run so, in place."""
        if self.name == CHECKPOINTING:
            model.gradient_checkpointing_enable()  # type: ignore[operator]  # transformers has it, torch does not
        if self.memory is not None:
            observe = {"log_level": "error", "memory_stats": False}
            ort_accel.accelerate(model, {"memory": self.memory, "observe": observe})


@dataclass(frozen=True)
class Figures:
    """What was measured of one way, or why it could not run."""

    loss: float = 0.0
    milliseconds: float = 0.0
    before: int = 0
    """Bytes of parameters, buffers and optimizer states."""
    own: int = 0
    """By how many bytes the resident set grew in a step at most."""
    predicted: int | None = None
    """What was predicted of the whole, with a budget."""
    budget: float | None = None
    """The budget in bytes."""
    refused: str = ""


def measure(way: Way, workload: Workload, steps: int, threads: int) -> Figures:
    """Steps with AdamW in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    model, batch = build(workload), batch_of(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    way.prepare(model)
    try:
        loss = _step(model, batch, optimizer)
    except OrtAccelError as error:
        return Figures(refused=str(error))
    _step(model, batch, optimizer)
    times, grown = zip(*(_timed(model, batch, optimizer) for _ in range(steps)), strict=True)
    states = [value for state in optimizer.state.values() for value in state.values()]
    before = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers(), *states])
    figures = Figures(loss, 1e3 * median(times), before, max(grown))
    frontiers = [item.frontier for item in ort_accel.report(model).memory.values()] if way.memory is not None else []
    if not frontiers or not frontiers[-1]:
        return figures
    share = way.memory.get("budget") if way.memory else None
    tried = frontiers[-1]
    budget = share * tried[0].bytes if isinstance(share, float) else None
    return Figures(**{**asdict(figures), "predicted": tried[-1].bytes, "budget": budget})


def _step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    loss = contenders.step(model, batch, "fp32")
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _timed(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> tuple[float, int]:
    """Seconds of a step, and of the next one, which begins with empty pools, the bytes that the process grew by."""
    start = time.perf_counter()
    _step(model, batch, optimizer)
    spent = time.perf_counter() - start
    release_unused()
    return_free_memory()
    base, is_told = resident(), reset_peak()
    _step(model, batch, optimizer)
    most = resident("VmHWM")
    if base is None or most is None or not is_told:
        raise typer.BadParameter("this system does not tell the most memory that a process held; use Linux")
    return spent, most - base


def memory(
    case: Annotated[str, typer.Option(help="small, bert or llama.")] = "small",
    levels: Annotated[str, typer.Option(help="Levels of recomputation.")] = "0,1,2",
    budgets: Annotated[str, typer.Option(help="Shares of the predicted peak.")] = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2",
    steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="As many as PyTorch takes without it.")] = None,
    tiny: Annotated[bool, typer.Option(help="Tiny models, to try the script.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it.")] = None,
) -> None:
    """Measure forward, backward and AdamW, each way in a process of its own, one after the other.

    The exit code is 1 if a loss is not eager's.
    """
    workload, cores = CASES[case], threads or torch.get_num_threads()
    workload = replace(workload, **SMALLER) if tiny else workload
    ways = [Way(EAGER), Way(CHECKPOINTING)]
    ways += [Way(f"ort_accel, level {level}", {"level": int(level)}) for level in levels.split(",") if level]
    ways += [Way(f"ort_accel, budget {share}", {"budget": float(share)}) for share in budgets.split(",") if share]
    facts, found = machine.facts(cores), {}
    typer.echo(f"{workload}, {cores} threads")
    for way in ways:
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            found[way.name] = alone.submit(measure, way, workload, steps, cores).result()
        typer.echo(_line(way.name, found[way.name]))
    if json_file is not None:
        figures = {name: asdict(item) for name, item in found.items()}
        result = {"machine": facts | {"load_after": machine.load()}, "workload": asdict(workload), "ways": figures}
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    losses = [item.loss for item in found.values() if not item.refused]
    if any(abs(loss - losses[0]) > contenders.FP32_TOLERANCE * abs(losses[0]) for loss in losses):
        raise typer.Exit(1)


def _line(name: str, found: Figures) -> str:
    if found.refused:
        return f"{name:26} {found.refused}"
    whole = found.before + found.own
    shown = f"{name:26} {whole / MIB:9.1f} MiB, {found.own / MIB:9.1f} of the step, {found.milliseconds:9.1f} ms"
    if found.predicted is not None and found.budget is not None:
        shown += f", predicted {found.predicted / MIB:9.1f} MiB, budget {found.budget / MIB:9.1f} MiB"
    return shown


if __name__ == "__main__":
    typer.run(memory)
