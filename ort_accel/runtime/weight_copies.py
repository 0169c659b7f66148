"""`precision.cache_cast_weights`: autocast's smaller copy of a weight, made once for the micro-batches of a step.

A copy serves as long as its weight is the same memory in the same version, which every write through PyTorch counts up,
and gradients are being accumulated. A first micro-batch, after `zero_grad`, always casts anew, and any optimizer's step
drops all copies before it changes weights: so those are seen, too, that are written behind autograd's back, by `.data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ort_accel.config.values import Switch
from ort_accel.reporting import Report

FEATURE = "precision.cache_cast_weights"

Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Copy:
    version: int
    weight: Tensor
    """Looks at the weight's memory, so that nothing else is ever put there while the copy is kept."""
    copy: Tensor


class WeightCopies:
    """The copies of one model's weights."""

    def __init__(self, wish: Switch, report: Report) -> None:
        self._keeps = wish is True
        """With `auto`, from when gradients were first seen to be accumulated."""
        self._report = report
        self._copies: dict[Key, _Copy] = {}
        drop = ref(self)

        def before_step(*_: Any) -> None:
            if (copies := drop()) is not None:
                copies.clear()

        finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def clear(self) -> None:
        """Drop all copies."""
        self._copies.clear()

    @torch.no_grad()
    def cast(self, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Each weight in the type that stands beside it."""
        is_accumulating = any(weight.grad is not None for weight in weights if weight.is_leaf)
        if not is_accumulating:
            self.clear()
        self._keeps |= is_accumulating
        before = len(self._copies)
        results = [self._cast(weight, dtype) for weight, dtype in zip(weights, dtypes, strict=True)]
        if before:
            self._record()
        return results

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        key = (weight.data_ptr(), weight.shape, weight.stride(), dtype)
        kept, version = self._copies.get(key), None if weight.is_inference() else weight._version
        if kept is not None and kept.version == version:
            self._report.counters["weight copies used again"] += 1
            return kept.copy
        copy = weight.to(dtype)
        if self._keeps and version is not None:
            self._copies[key] = _Copy(version, weight.detach(), copy)
        return copy

    def _record(self) -> None:
        size = sum(each.copy.nbytes for each in self._copies.values()) / 2**20
        effect = f"copies of {len(self._copies)} weights ({size:.1f} MiB) are kept between micro-batches"
        self._report.applied(FEATURE, effect)
