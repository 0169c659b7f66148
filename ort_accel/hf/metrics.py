"""What the engine's training steps cost, as numbers beside the loss in a Trainer's log."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import ort_accel
from ort_accel.errors import OrtAccelError


class StepMetrics:
    """Collects between two lines of the log. All numbers are of this process.

    `ort/step_time` is in seconds an optimizer step, `ort/tokens_per_s` counts tokens that are not padding,
    `ort/density` is their share, `ort/peak_memory` is the most memory the process has held so far, in MiB, and
    `ort/fallbacks` the number of nodes that ONNX Runtime cannot run and PyTorch runs. What is not known is left out.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._forget()

    def begin_step(self) -> None:
        """An optimizer step begins."""
        self._began = time.perf_counter()

    def see(self, inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a batch that is about to be trained on."""
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            self._valid.append(mask.count_nonzero())
            self._all += mask.numel()
            self._masked = True
        elif isinstance(ids, torch.Tensor):
            self._valid.append(torch.tensor(ids.numel()))
            self._all += ids.numel()

    def end_step(self) -> None:
        """An optimizer step is over."""
        if self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._steps += 1
            self._began = None

    def take(self, model: nn.Module | None) -> dict[str, float]:
        """The numbers since the last call; nothing before the first step."""
        if not self._steps:
            return {}
        values: dict[str, float] = {"ort/step_time": self._seconds / self._steps}
        if self._all:
            valid = sum(int(count) for count in self._valid)
            values["ort/tokens_per_s"] = valid / self._seconds
            if self._masked:
                values["ort/density"] = valid / self._all
        values["ort/peak_memory"] = peak_memory() / 2**20
        fallbacks = None if model is None else _fallbacks(model)
        if fallbacks is not None:
            values["ort/fallbacks"] = fallbacks
        self._forget()
        return values

    def _forget(self) -> None:
        self._seconds, self._steps = 0.0, 0
        # Counts stay tensors until they are logged: reading one would make the host wait for its device.
        self._valid: list[torch.Tensor] = []
        self._all, self._masked = 0, False


def peak_memory() -> int:
    """The most memory that this process has held, in bytes: of the GPU where it uses one, else resident."""
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    if allocated:
        return allocated
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _fallbacks(model: nn.Module) -> int | None:
    try:
        report = ort_accel.report(model)
    except OrtAccelError:  # the engine is switched off
        return None
    return sum(fallback.count for fallback in report.fallbacks if not fallback.reason.is_choice)
