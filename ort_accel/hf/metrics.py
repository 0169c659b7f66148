"""Metrics of training steps, for the Trainer's log and the report."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ort_accel.memory.process_memory import peak_before_reset
from ort_accel.observe.density import IGNORED, is_of_tokens
from ort_accel.reporting.report import Report, State
from ort_accel.runtime.work_count import WORK


@dataclass
class _Share:
    """The count of valid elements among all. Counts stay tensors until they are read, since reading blocks the host."""

    counts: list[torch.Tensor | int] = field(default_factory=list)
    total: int = 0

    def add(self, count: torch.Tensor | int, total: int) -> None:
        self.counts.append(count)
        self.total += total

    def valid(self) -> int:
        self.counts = [sum(map(int, self.counts))]
        return int(self.counts[0])


@dataclass
class _Step:
    """The metrics of one optimizer step."""

    tokens: _Share = field(default_factory=_Share)
    labels: _Share = field(default_factory=_Share)
    is_masked: bool = False
    number: int = 0
    seconds: float = 0.0
    flops: int | None = None
    """The floating point operations that compiled graphs computed; None where eager mode ran as well."""


def _mean_metrics(steps: Sequence[_Step], peak: float | None) -> dict[str, float]:
    """Returns the metrics over these steps, on a device with this peak of floating point operations a second."""
    seconds = sum(step.seconds for step in steps)
    tokens, valid = sum(step.tokens.total for step in steps), sum(step.tokens.valid() for step in steps)
    labels = sum(step.labels.total for step in steps)
    found = {"ort/step_time": seconds / len(steps)}
    if tokens:
        found["ort/tokens_per_s"] = valid / seconds
    if tokens and any(step.is_masked for step in steps):
        found["ort/density"] = valid / tokens
    if labels:
        found["ort/label_density"] = sum(step.labels.valid() for step in steps) / labels
    counted = [(step.flops, step.seconds) for step in steps if step.flops is not None]
    if counted:
        flops, seconds = map(sum, zip(*counted, strict=True))
        found["ort/flops_per_s"] = flops / seconds
        if peak:
            found["ort/mfu"] = flops / seconds / peak
    return found


def _not_padding(positions: torch.Tensor) -> torch.Tensor:
    """Returns a value for each token, 0 for padding at the end of packed rows, where every position is 0."""
    return (positions != 0).flip(-1).cumsum(-1)


class StepMetrics:
    """Collects the metrics of this process between two lines of the log. Unknown metrics are left out.

    - `ort/step_time`: seconds of an optimizer step
    - `ort/tokens_per_s`: tokens a second, without padding
    - `ort/density`: the share of tokens that are not padding
    - `ort/label_density`: the share of token labels that are not ignored
    - `ort/flops_per_s`: floating point operations a second of matrix products, convolutions and attention, from the
      captured graphs; of the steps that the engine ran, without recomputation
    - `ort/mfu`: these as a share of the peak, which is the speed of a large matrix product on this device
    - `ort/peak_memory`: the most memory that the process has held, in MiB
    - `ort/fallbacks`: the number of nodes that PyTorch runs because ONNX Runtime cannot
    """

    def __init__(self) -> None:
        self.report: Report | None = None
        """The report that gets the metrics of each step."""
        self.counts_flops = True
        self.peak: Callable[[], float | None] = lambda: None
        """Returns the floating point operations a second that the device can do; None if that is not known."""
        self._start: float | None = None
        self._current = _Step()
        self._steps: list[_Step] = []

    def begin_step(self) -> None:
        """Start the timer of an optimizer step."""
        self._start = time.perf_counter()
        if self.counts_flops:
            WORK.begin()

    def count_tokens(self, inputs: Mapping[str, object]) -> None:
        """Count the tokens and labels of a batch."""
        names = ("input_ids", "attention_mask", "labels", "position_ids")
        ids, mask, labels, positions = (inputs.get(name) for name in names)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            self._current.tokens.add(mask.count_nonzero(), mask.numel())
            self._current.is_masked = True
        elif isinstance(positions, torch.Tensor) and isinstance(ids, torch.Tensor) and positions.shape == ids.shape:
            self._current.tokens.add(_not_padding(positions).count_nonzero(), ids.numel())
            self._current.is_masked = True
        elif isinstance(ids, torch.Tensor):
            self._current.tokens.add(ids.numel(), ids.numel())
        if is_of_tokens(labels):
            self._current.labels.add((labels != IGNORED).count_nonzero(), labels.numel())

    def end_step(self, number: int) -> None:
        """End the optimizer step with this number."""
        if self._start is not None:
            self._current.number, self._current.seconds = number, time.perf_counter() - self._start
            self._current.flops = WORK.end()
            self._steps.append(self._current)
            self._current, self._start = _Step(), None

    def take(self) -> dict[str, float]:
        """Returns the metrics since the last call; none before the first step."""
        steps, self._steps = self._steps, []
        if not steps:
            return {}
        peak = self.peak() if any(step.flops is not None for step in steps) else None
        for step in steps:
            self._record(step.number, _mean_metrics([step], peak))
        memory = {"ort/peak_memory": peak_memory() / 2**20}
        self._record(steps[-1].number, memory)
        return _mean_metrics(steps, peak) | memory | self._fallbacks()

    def _record(self, step: int, values: Mapping[str, float]) -> None:
        if self.report is not None:
            for name, value in values.items():
                self.report.measured(name, step, value)

    def _fallbacks(self) -> dict[str, float]:
        engine = self.report.features.get("engine") if self.report is not None else None
        if self.report is None or engine is None or engine.state is not State.APPLIED:
            return {}
        return {"ort/fallbacks": sum(item.count for item in self.report.fallbacks if item.is_forced)}


def peak_memory() -> int:
    """Returns the most memory that this process has held, in bytes: of its GPU, or resident."""
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    if allocated:
        return allocated
    unit = 1 if sys.platform == "darwin" else 1024
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, peak_before_reset())
