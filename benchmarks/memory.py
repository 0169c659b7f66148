"""The peak memory and the time of a training step: eager PyTorch, with checkpointing, and ort_accel. See `--help`."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
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
from ort_accel.config.values import bytes_in
from ort_accel.errors import OrtAccelError
from ort_accel.memory.malloc_settings import trim_heap
from ort_accel.memory.process_memory import AllocationSampler, in_use, reset_high_water_mark, resident
from ort_accel.optim import FusedAdam, step_in_backward

CHECKPOINTING = "eager, checkpointing"
EARLY = "level 1, early updates"
EQUAL = "checkpointing's peak, early"
SETTLING = 4
"""Steps before those that are timed: one compiles, the pools grow in the next, ort_accel empties them before the third,
and in the fourth it measures its own peak."""
FILLING = 2
"""Steps that fill the pools again. Where none are timed, ort_accel empties them once more before the second one."""
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
    steps_early: bool = False
    """Each parameter is updated within the backward."""

    @property
    def budget(self) -> float | str | None:
        """The share of the peak that it may take, or a size."""
        return self.memory.get("budget") if self.memory else None

    def prepare(self, model: nn.Module) -> None:
        """Let a model run so, in place."""
        if self.name == CHECKPOINTING:
            model.gradient_checkpointing_enable()  # type: ignore[operator]  # transformers has it, torch does not
        if self.memory is not None:
            wish: dict[str, Any] = {
                "engine": {"compare_with_eager": False},
                "memory": self.memory,
                "observe": {"log_level": "error", "memory_stats": True},
            }
            if self.steps_early:
                wish["memory"] = {**self.memory, "early_gradient_release": True}
                wish["optimizer"] = {"name": "adamw_ort_fused", "step_in_backward": True}
            ort_accel.accelerate(model, wish)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, which steps when it is told to, or as soon as it can."""
        if not self.steps_early:
            return torch.optim.AdamW(model.parameters(), lr=1e-4)
        optimizer = FusedAdam(model.parameters(), lr=1e-4)
        step_in_backward(optimizer)
        return optimizer


@dataclass(frozen=True)
class Figures:
    """What was measured of one way, or why it could not run."""

    loss: float = 0.0
    milliseconds: float = 0.0
    before: int = 0
    """Bytes of parameters, buffers and optimizer states."""
    in_use: int = 0
    """By how many bytes a step exceeds at most what the allocators had given out and not got back before it, with
    nothing in it that is only kept for steps."""
    resident: int = 0
    """The same for the resident set; the C library keeps what is freed."""
    stash: int | None = None
    """Bytes that the forward keeps for the backward."""
    predicted: int | None = None
    """What was predicted of the whole."""
    budget: float | None = None
    """The budget in bytes."""
    refused: str = ""

    @property
    def peak(self) -> int:
        """The most bytes in use."""
        return self.before + self.in_use


def measure(way: Way, workload: Workload, steps: int, threads: int) -> Figures:
    """Steps with AdamW in this process: those in which all settles, those that are timed, and those that fill empty
    pools again, of which the last one's memory is measured."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    model, batch = build(workload), batch_of(workload)
    if workload.model == "bert":  # transformers notes it in the first forward, and all would be compiled once more
        model.config.problem_type = "single_label_classification"  # type: ignore[union-attr]
    optimizer = way.optimizer(model)
    way.prepare(model)
    try:
        loss = _step(model, batch, optimizer)
    except OrtAccelError as error:
        return Figures(refused=str(error))
    for _ in range(SETTLING - 1 if steps else 0):
        _step(model, batch, optimizer)
    times = [_seconds(model, batch, optimizer) for _ in range(steps)]
    in_use, grown = _grown(model, batch, optimizer)
    states = [value for state in optimizer.state.values() for value in state.values()]
    before = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers(), *states])
    figures = Figures(loss, 1e3 * median(times) if times else 0.0, before, in_use, grown)
    return figures if way.memory is None else _foreseen(figures, way, model)


def _foreseen(figures: Figures, way: Way, model: nn.Module) -> Figures:
    graph = list(ort_accel.report(model).memory.values())[-1]
    budget = bytes_in(way.budget) if isinstance(way.budget, str) else way.budget
    if isinstance(budget, float):
        budget *= graph.frontier[0].bytes
    return replace(figures, stash=graph.stash, predicted=graph.frontier[-1].bytes, budget=budget)


def _step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    """A step as most loops write it: the model's outputs are there until the next ones come."""
    torch.manual_seed(0)
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(outputs.loss.detach())


def _seconds(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    _step(model, batch, optimizer)
    return time.perf_counter() - start


def _grown(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Returns by how many bytes the memory in use and the resident set grow in a step, from a trimmed heap.

    The step begins as any later one does: with all that those before it left in the heap.
    """
    trim_heap()
    base, used = resident(), in_use()
    for _ in range(FILLING):
        _step(model, batch, optimizer)
    is_told = reset_high_water_mark()
    looking = AllocationSampler()
    _step(model, batch, optimizer)
    most_used, most = looking.end(), resident("VmHWM")
    if base is None or used is None or most is None or most_used is None or not is_told:
        raise typer.BadParameter("this system does not tell the most memory that a process held; use Linux with glibc")
    return most_used - used, most - base


def within(peak: int) -> Way:
    """Updates parameters within the backward, and may take this peak. Predictions were right within 2 %."""
    return Way(EQUAL, {"budget": f"{int(0.98 * peak) >> 10}KiB"}, steps_early=True)


class Bench:
    """Measures each way once, in a process of its own, and writes down what is known so far."""

    def __init__(self, workload: Workload, steps: int, threads: int, file: Path | None = None) -> None:
        self.workload, self._steps, self._threads, self._file = workload, steps, threads, file
        self._facts = machine.facts(threads)
        self.found: dict[str, Figures] = {}
        self.largest: dict[str, int] = {}
        self._refused: Figures | None = None

    def run(self, way: Way) -> None:
        """Measure a way. A share below one that was refused would be refused, too."""
        refused = self._refused if isinstance(way.budget, float) else None
        self.found[way.name] = refused or self._alone(way, self.workload, self._steps)
        if isinstance(way.budget, float) and self.found[way.name].refused:
            self._refused = self.found[way.name]
        typer.echo(_line(way.name, self.found[way.name]))
        self._write()

    def find_largest(self, way: Way) -> None:
        """The largest batch of a way that takes no more than eager PyTorch does with the batch that was measured.

        Twice as many rows are tried until they take more. What a step takes grows by no less for a row than for those
        before it, so on a line between the last two sizes lies one that fits, which is measured, too.
        """
        largest, peak, limit = self.workload.batch, self.found[way.name].peak, self.found[EAGER].peak
        while (above := self._peak(way, 2 * largest)) <= limit:
            largest, peak = 2 * largest, above
        fits = largest
        largest += int(largest * (limit - peak) / (above - peak))
        while largest > fits and self._peak(way, largest) > limit:
            largest -= max(1, largest // 20)
        self.largest[way.name] = largest
        typer.echo(f"{way.name:26} at most {largest} rows within {limit / MIB:,.1f} MiB")
        self._write()

    def _peak(self, way: Way, rows: int) -> int:
        return self._alone(way, replace(self.workload, batch=rows), 0).peak

    def _write(self) -> None:
        if self._file is None:
            return
        facts = self._facts | {"load_after": machine.load()}
        figures = {name: asdict(item) for name, item in self.found.items()}
        result = {"machine": facts, "workload": asdict(self.workload), "ways": figures, "largest": self.largest}
        self._file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def _alone(self, way: Way, workload: Workload, steps: int) -> Figures:
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            return alone.submit(measure, way, workload, steps, self._threads).result()


def memory(
    case: Annotated[str, typer.Option(help="small, bert or llama.")] = "small",
    levels: Annotated[str, typer.Option(help="Levels of recomputation.")] = "0,1",
    budgets: Annotated[str, typer.Option(help="Shares of the predicted peak.")] = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2",
    largest: Annotated[bool, typer.Option(help="Find the largest batch within eager's peak, too.")] = False,
    steps: Annotated[int, typer.Option(min=0, help="Steps that are timed; 0 measures memory alone.")] = 3,
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
    last = ways[-1]
    ways += [Way(EARLY, {"level": 1}, steps_early=True)] if "1" in levels.split(",") else []
    shares = sorted(map(float, filter(None, budgets.split(","))), reverse=True)
    bench = Bench(workload, steps, cores, json_file)
    typer.echo(f"{workload}, {cores} threads")
    for way in ways:
        bench.run(way)
    bench.run(within(bench.found[CHECKPOINTING].peak))
    for share in shares:
        bench.run(Way(f"ort_accel, budget {share}", {"budget": share}))
    for way in ways[1:] if largest else ():
        if way.name in (CHECKPOINTING, EARLY, last.name):
            bench.find_largest(way)
    for line in compared(bench.found):
        typer.echo(line)
    losses = [item.loss for item in bench.found.values() if not item.refused]
    if any(abs(loss - losses[0]) > contenders.FP32_TOLERANCE * abs(losses[0]) for loss in losses):
        raise typer.Exit(1)


def _line(name: str, found: Figures) -> str:
    if found.refused:
        return f"{name:26} {found.refused}"
    shown = f"{name:26} {found.peak / MIB:9.1f} MiB in use, {found.in_use / MIB:9.1f} of the step"
    shown += f" ({found.resident / MIB:9.1f} resident), {found.milliseconds:9.1f} ms"
    if found.predicted is not None:
        shown += f", predicted {found.predicted / MIB:9.1f} MiB ({found.predicted / found.peak - 1:+.1%})"
    return shown if found.budget is None else f"{shown}, budget {found.budget / MIB:9.1f} MiB"


def compared(found: dict[str, Figures]) -> Iterator[str]:
    """What the figures say together."""
    zero, one = (found.get(f"ort_accel, level {level}") for level in (0, 1))
    if zero and one and zero.stash and one.stash is not None:
        slower = f" and takes {one.milliseconds / zero.milliseconds:.2f} times as long" if zero.milliseconds else ""
        yield f"level 1 keeps {one.stash / zero.stash:.1%} of level 0's stash{slower}"
    checkpointing = found[CHECKPOINTING]
    ours = [item for item in found.values() if item.predicted and item.peak <= checkpointing.peak]
    if ours and checkpointing.milliseconds:
        times = checkpointing.milliseconds / min(item.milliseconds for item in ours)
        yield f"within the peak of eager with checkpointing, ort_accel is {times:.2f} times as fast"
    over = [item.peak / item.budget - 1 for item in found.values() if item.budget]
    if over:
        yield f"with a budget the peak is {max(over):+.1%} of it at most"


if __name__ == "__main__":
    typer.run(memory)
