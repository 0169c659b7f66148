"""Training the same thing twice, on eager PyTorch and on ort_accel, and what that cost side by side."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

import ort_accel
from ort_accel.observe.feature_table import render

WARM_UP_STEPS = 2
"""The first step compiles, and the second may compile once more, for sizes that change."""


@dataclass(frozen=True)
class Outcome:
    """The figures of one training run; None for figures that were not measured."""

    name: str
    train_loss: float | None
    eval_loss: float | None
    accuracy: float | None
    tokens_per_s: float | None
    warm_tokens_per_s: float | None
    peak_memory: int
    wall_time: float


class StepClock(TrainerCallback):
    """Seconds and valid (not padded) tokens of each training step: forward, backward and optimizer."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []

    def on_step_begin(self, _args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._begin = state.num_input_tokens_seen, time.perf_counter()

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        tokens, begin = self._begin
        self.steps.append((int(state.num_input_tokens_seen) - tokens, time.perf_counter() - begin))

    def rate(self, skip: int = 0) -> float | None:
        """Valid tokens per second, all steps after the first `skip` together."""
        steps = self.steps[skip:]
        return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps) if steps else None


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


def measure(name: str, trainer: Trainer) -> Outcome:
    """Train, evaluate, and say what it came to."""
    clock = StepClock()
    trainer.args.include_num_input_tokens_seen = "non_padding"
    trainer.add_callback(clock)
    with PeakMemory() as memory:
        begin = time.perf_counter()
        trainer.train()
        wall_time = time.perf_counter() - begin
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    held_out = trainer.evaluate()
    return Outcome(
        name=name,
        train_loss=losses[-1] if losses else None,
        eval_loss=held_out.get("eval_loss"),
        accuracy=held_out.get("eval_accuracy"),
        tokens_per_s=clock.rate(),
        warm_tokens_per_s=clock.rate(skip=WARM_UP_STEPS),
        peak_memory=memory.growth,
        wall_time=wall_time,
    )


def train_and_show(
    build: Callable[[type[Trainer]], Trainer], ours: type[Trainer], eager: type[Trainer] | None, console: Console
) -> Trainer:
    """Train on ONNX Runtime, before that on eager PyTorch where asked for, and show what was measured."""
    outcomes = [measure("eager PyTorch", build(eager))] if eager is not None else []
    trainer = build(ours)
    outcomes.append(measure("ort_accel", trainer))
    show_outcomes(console, outcomes)
    console.print(render(ort_accel.report(trainer.model), everything=False))
    return trainer


def exit_code(run: Callable[[], None]) -> int:
    """Run a script; 2 means that its configuration or set-up cannot be used, and the reason is printed."""
    try:
        run()
    except ort_accel.OrtAccelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def show_outcomes(console: Console, outcomes: list[Outcome]) -> None:
    """Print one column a run."""
    table = Table("", *(outcome.name for outcome in outcomes), title="Measured in this run")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(label: str, text: Callable[[Any], str], key: str) -> None:
        values = [getattr(outcome, key) for outcome in outcomes]
        if any(value is not None for value in values):
            table.add_row(label, *("not measured" if value is None else text(value) for value in values))

    row("train loss, last logged", "{:.4f}".format, "train_loss")
    row("held-out loss", "{:.4f}".format, "eval_loss")
    row("held-out accuracy", "{:.1%}".format, "accuracy")
    row("valid tokens/s, all steps", "{:,.0f}".format, "tokens_per_s")
    row(f"valid tokens/s, after {WARM_UP_STEPS} warm-up steps", "{:,.0f}".format, "warm_tokens_per_s")
    row("peak memory of training, MiB", lambda size: f"{size / 2**20:,.0f}", "peak_memory")
    row("wall time of training, s", "{:.1f}".format, "wall_time")
    console.print(table)
    console.print(
        "A step is forward, backward and optimizer; padding does not count as tokens. Peak memory is how far the "
        "resident memory of this process rose while it trained, above what it held before (model and data included "
        "there).",
        style="dim",
    )
