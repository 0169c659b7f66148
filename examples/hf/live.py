"""Shows a training while it runs: on one line of a terminal that moves, or as lines of a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback, TrainerState, TrainingArguments

LOG_LINES = 6
"""Lines of a log about the steps of a training."""
RATE_STEPS = 4
"""The last steps, over which the shown rate is taken."""


def rate(steps: Sequence[tuple[int, float]]) -> float | None:
    """Tokens per second of steps with their tokens and seconds, all together; None if there are none."""
    return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps) if steps else None


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


class LiveTraining(StepClock):
    """Shows each step with its rate, and in a log the phases of the set-up, too.

    On a terminal, ort_accel shows its set-up itself, and this line waits until the step is over.
    """

    def __init__(self, name: str, console: Console) -> None:
        super().__init__()
        self._name, self._console = name, console
        self._loss = ""
        self._phase = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(name, said="begins", total=None)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Show that the training begins."""
        self._begin_s = time.perf_counter()
        if self._console.is_terminal:
            self._progress.start()
        else:
            self._print("begins")

    def begin(self, phase: str, graph: str) -> None:
        """A phase of the set-up begins."""
        text = f"{phase}, {graph.split()[0]} graph" if graph else phase
        if self._console.is_terminal:
            self._progress.stop()
        elif text != self._phase:
            self._phase = text
            self._print(f"set-up: {text}")

    def end(self) -> None:
        """A phase of the set-up ends."""

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        """Remember the loss."""
        if logs and "loss" in logs:
            self._loss = f", loss {float(logs['loss']):.3f}"

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *more: Any, **named: Any) -> None:
        """Show the step."""
        super().on_step_end(args, state, *more, **named)
        step, steps = state.global_step, state.max_steps
        said = f"step {step} of {steps}, {rate(self.steps[-RATE_STEPS:]):,.0f} tokens/s{self._loss}"
        if self._console.is_terminal:
            self._progress.start()
            self._progress.update(self._task, total=steps, completed=step, said=said)
        elif step % max(1, steps // LOG_LINES) == 0 and step < steps:
            self._print(said)

    def on_train_end(self, _args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Leave a line about the whole training."""
        if self._console.is_terminal:
            self._progress.stop()
        self._print(f"{state.global_step} steps{self._loss}")

    def _print(self, text: str) -> None:
        seconds = time.perf_counter() - self._begin_s
        self._console.print(f"{self._name}: {text}, {seconds:.0f} s", highlight=False, soft_wrap=True)
