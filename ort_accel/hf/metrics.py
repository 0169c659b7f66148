"""What the engine's training steps cost: numbers beside the loss in a Trainer's log, and step by step in the report."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_accel.reporting import Report, State


@dataclass
class _Step:
    """One optimizer step. Counts stay tensors until they are read: reading one makes the host wait for its device."""

    valid: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    is_masked: bool = False
    number: int = 0
    seconds: float = 0.0

    def values(self, seconds: float, steps: int, valid: int) -> dict[str, float]:
        """The figures of as many steps as these numbers are of."""
        found = {"ort/step_time": seconds / steps}
        if self.tokens:
            found["ort/tokens_per_s"] = valid / seconds
            if self.is_masked:
                found["ort/density"] = valid / self.tokens
        return found


class StepMetrics:
    """Collects between two lines of the log. All numbers are of this process.

    `ort/step_time` is in seconds an optimizer step, `ort/tokens_per_s` counts tokens that are not padding,
    `ort/density` is their share, `ort/peak_memory` is the most memory the process has held so far, in MiB, and
    `ort/fallbacks` the number of nodes that ONNX Runtime cannot run and PyTorch runs. What is not known is left out.
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
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            self._now.valid.append(mask.count_nonzero())
            self._now.tokens += mask.numel()
            self._now.is_masked = True
        elif isinstance(ids, torch.Tensor):
            self._now.valid.append(torch.tensor(ids.numel()))
            self._now.tokens += ids.numel()

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
        total, valid = _Step(), 0
        for step in steps:
            count = sum(int(tokens) for tokens in step.valid)
            self._record(step.number, step.values(step.seconds, 1, count))
            total.seconds, total.tokens, valid = total.seconds + step.seconds, total.tokens + step.tokens, valid + count
            total.is_masked |= step.is_masked
        memory = {"ort/peak_memory": peak_memory() / 2**20}
        self._record(steps[-1].number, memory)
        return total.values(total.seconds, len(steps), valid) | memory | self._fallbacks()

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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
