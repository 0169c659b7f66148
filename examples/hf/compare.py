"""Training the same thing twice, on eager PyTorch and on ort_accel, and what that cost side by side."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from live import LiveTraining, rate
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.utils import logging

import ort_accel
from ort_accel.observe.feature_table import render_hints, render_kernels
from ort_accel.reporting.report import Report
from ort_accel.reporting.timings import EAGER, ENGINE

WARM_UP_STEPS = 2
"""The first step compiles, and the second may compile once more, for sizes that change."""


@dataclass(frozen=True)
class Outcome:
    """The figures of one training run; None for figures that were not measured."""

    name: str
    train_loss: float | None
    eval_loss: float | None
    accuracy: float | None
    steps: list[tuple[int, float]]
    """Valid (not padded) tokens and seconds of each step."""
    peak_memory: int
    wall_time: float
    set_up: float
    """Seconds of the wall time in which ort_accel captured and compiled."""

    @property
    def tokens_per_s(self) -> float | None:
        """Valid tokens per second, all steps together."""
        return rate(self.steps)

    @property
    def warm_tokens_per_s(self) -> float | None:
        """The same without the first steps."""
        return rate(self.steps[WARM_UP_STEPS:])


class PeakMemory:
    """How far the process's resident memory rises above where it was at the beginning, looked at every 5 ms."""

    def __enter__(self) -> PeakMemory:
        give_back_memory()
        self._process = psutil.Process()
        self._begin = self._peak = self._process.memory_info().rss
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    @property
    def growth(self) -> int:
        """Bytes."""
        return self._peak - self._begin

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._peak = max(self._peak, self._process.memory_info().rss)


def give_back_memory() -> None:
    """Return freed memory to the system, or a later run would be measured as growing by less than it uses."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def measure(name: str, trainer: Trainer, console: Console) -> Outcome:
    """Train, evaluate, and return the figures."""
    live = LiveTraining(name, console)
    report = ort_accel.report(trainer.model) if name == ENGINE else Report()
    report.watchers.append(live)
    trainer.args.include_num_input_tokens_seen = "non_padding"
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(live)
    with PeakMemory() as memory:
        begin = time.perf_counter()
        trainer.train()
        wall_time = time.perf_counter() - begin
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    set_up = report.set_up_seconds
    held_out = trainer.evaluate()
    report.watchers.remove(live)
    return Outcome(
        name=name,
        train_loss=losses[-1] if losses else None,
        eval_loss=held_out.get("eval_loss"),
        accuracy=held_out.get("eval_accuracy"),
        steps=live.steps,
        peak_memory=memory.growth,
        wall_time=wall_time,
        set_up=set_up,
    )


def train_and_show(
    build: Callable[[type[Trainer]], Trainer], ours: type[Trainer], eager: type[Trainer] | None, console: Console
) -> Trainer:
    """Train on ONNX Runtime, before that on eager PyTorch where asked for, and show the figures and the report."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    outcomes = [measure(EAGER, build(eager), console)] if eager is not None else []
    trainer = build(ours)
    outcomes.append(measure(ENGINE, trainer, console))
    report = ort_accel.report(trainer.model)
    for outcome in outcomes:
        add_to_report(report, outcome)
    page = Path(trainer.args.output_dir) / "report.html"
    ort_accel.save_report(trainer.model, page)
    show_results(console, outcomes, report)
    console.print(f"\nThe whole report, with plots: {page}", highlight=False, soft_wrap=True)
    return trainer


def show_results(console: Console, outcomes: list[Outcome], report: Report) -> None:
    """Show the figures of the runs, then what ran where and what to try next."""
    console.print()
    show_outcomes(console, outcomes)
    for part in (render_kernels(report), render_hints(report)):
        if part is not None:
            console.print()
            console.print(part)


def add_to_report(report: Report, outcome: Outcome) -> None:
    """Add the figures of a run, for the plots of the report's page."""
    side = "ort" if outcome.name == ENGINE else "eager"
    report.measured(f"{side}/memory_growth", 1, outcome.peak_memory / 2**20)
    if side == "eager":
        for number, (tokens, seconds) in enumerate(outcome.steps, 1):
            report.measured("eager/step_time", number, seconds)
            report.measured("eager/tokens_per_s", number, tokens / seconds)


def exit_code(run: Callable[[], None]) -> int:
    """Run a script; 2 means that its configuration or set-up cannot be used, and the reason is printed."""
    try:
        run()
    except ort_accel.OrtAccelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


@dataclass(frozen=True)
class Row:
    """A row of the table of figures."""

    label: str
    key: str
    form: str
    unit: float = 1.0
    is_cost: bool = False
    """True if the ratio of the two is worth a column."""

    def cells(self, outcomes: list[Outcome]) -> list[str] | None:
        """The figures of all runs, and their ratio; None if no run has one."""
        values = [getattr(outcome, self.key) for outcome in outcomes]
        if all(value is None for value in values):
            return None
        cells = ["not measured" if value is None else self.form.format(value / self.unit) for value in values]
        if len(outcomes) < 2:
            return cells
        first, last = values[0], values[-1]
        return [*cells, f"{last / first:.2f}" if self.is_cost and first and last else ""]


ROWS = (
    Row(f"tokens/s, after {WARM_UP_STEPS} warm-up steps", "warm_tokens_per_s", "{:,.0f}", is_cost=True),
    Row("tokens/s, all steps", "tokens_per_s", "{:,.0f}", is_cost=True),
    Row("time of training, s", "wall_time", "{:.1f}", is_cost=True),
    Row("of this, set-up, s", "set_up", "{:.1f}"),
    Row("peak memory of training, MiB", "peak_memory", "{:,.0f}", unit=2**20, is_cost=True),
    Row("train loss, last logged", "train_loss", "{:.4f}"),
    Row("held-out loss", "eval_loss", "{:.4f}"),
    Row("held-out accuracy", "accuracy", "{:.1%}"),
)


def show_outcomes(console: Console, outcomes: list[Outcome]) -> None:
    """Print one column a run, and the ratio of the two."""
    names = [outcome.name for outcome in outcomes]
    table = Table("", *names, *(["ratio"] if len(names) > 1 else []), box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in ROWS:
        if cells := row.cells(outcomes):
            table.add_row(row.label, *cells)
    console.print(table)
    console.print(
        "Padding does not count as tokens. Memory is the growth of the process above model and data.",
        style="dim",
        soft_wrap=True,
    )
