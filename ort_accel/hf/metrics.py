"""What the engine's training steps cost: numbers beside the loss in a Trainer's log, and step by step in the report."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_accel.memory.process_memory import most_before_reset
from ort_accel.observe.density import IGNORED, is_of_tokens
from ort_accel.reporting import Report, State


@dataclass
class _Tally:
    """How many of how many count. Counts stay tensors until they are read: reading makes the host wait for a device."""

    counts: list[torch.Tensor | int] = field(default_factory=list)
    of: int = 0

    def add(self, count: torch.Tensor | int, of: int) -> None:
        self.counts.append(count)
        self.of += of

    def valid(self) -> int:
        self.counts = [sum(map(int, self.counts))]
        return int(self.counts[0])


@dataclass
class _Step:
    """One optimizer step."""

    tokens: _Tally = field(default_factory=_Tally)
    labels: _Tally = field(default_factory=_Tally)
    is_masked: bool = False
    number: int = 0
    seconds: float = 0.0


def _figures(steps: Sequence[_Step]) -> dict[str, float]:
    """What so many steps come to."""
    seconds = sum(step.seconds for step in steps)
    tokens, valid = sum(step.tokens.of for step in steps), sum(step.tokens.valid() for step in steps)
    labels = sum(step.labels.of for step in steps)
    found = {"ort/step_time": seconds / len(steps)}
    if tokens:
        found["ort/tokens_per_s"] = valid / seconds
    if tokens and any(step.is_masked for step in steps):
        found["ort/density"] = valid / tokens
    if labels:
        found["ort/label_density"] = sum(step.labels.valid() for step in steps) / labels
    return found


class StepMetrics:
    """Collects between two lines of the log. All numbers are of this process.

    `ort/step_time` is in seconds an optimizer step, `ort/tokens_per_s` counts tokens that are not padding,
    `ort/density` is their share, `ort/label_density` that of the labels of tokens that are not ignored,
    `ort/peak_memory` is the most memory the process has held so far, in MiB, and `ort/fallbacks` the number of nodes
    that ONNX Runtime cannot run and PyTorch runs. What is not known is left out.
    """

    def __init__(self) -> None:
        self.report: Report | None = None
        """Where each step is recorded."""
        self._began: float | None = None
        self._now = _Step()
        self._steps: list[_Step] = []

    def begin_step(self) -> None:
        """An optimizer step begins."""
        self._began = time.perf_counter()

    def see(self, inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a batch that is about to be trained on."""
        ids, mask, labels = (inputs.get(name) for name in ("input_ids", "attention_mask", "labels"))
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            self._now.tokens.add(mask.count_nonzero(), mask.numel())
            self._now.is_masked = True
        elif isinstance(ids, torch.Tensor):
            self._now.tokens.add(ids.numel(), ids.numel())
        if is_of_tokens(labels):
            self._now.labels.add((labels != IGNORED).count_nonzero(), labels.numel())

    def end_step(self, number: int) -> None:
        """An optimizer step is over, the one with this number."""
        if self._began is not None:
            self._now.number, self._now.seconds = number, time.perf_counter() - self._began
            self._steps.append(self._now)
            self._now, self._began = _Step(), None

    def take(self) -> dict[str, float]:
        """The numbers since the last call; nothing before the first step."""
        steps, self._steps = self._steps, []
        if not steps:
            return {}
        for step in steps:
            self._record(step.number, _figures([step]))
        memory = {"ort/peak_memory": peak_memory() / 2**20}
        self._record(steps[-1].number, memory)
        return _figures(steps) | memory | self._fallbacks()

    def _record(self, step: int, values: Mapping[str, float]) -> None:
        if self.report is not None:
            for name, value in values.items():
                self.report.measured(name, step, value)

    def _fallbacks(self) -> dict[str, float]:
        engine = self.report.features.get("engine") if self.report is not None else None
        if self.report is None or engine is None or engine.state is not State.APPLIED:
            return {}
        return {"ort/fallbacks": sum(item.count for item in self.report.fallbacks if not item.reason.is_choice)}


def peak_memory() -> int:
    """The most memory that this process has held, in bytes: of the GPU where it uses one, else resident."""
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    if allocated:
        return allocated
    unit = 1 if sys.platform == "darwin" else 1024
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, most_before_reset())
