"""`precision.cache_cast_weights`: the 16-bit copy of a weight is cast once for all micro-batches of a step.

A copy is valid while its weight has the same memory, version and numbers, and while gradients are accumulated. The
first micro-batch after `zero_grad` always casts again, and every optimizer step drops all copies. Writes through
`.data` do not change a tensor's version, so a sample of the numbers is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ort_accel.config.values import Switch
from ort_accel.reporting.report import Report

FEATURE = "precision.cache_cast_weights"

SAMPLED_NUMBERS = 64

Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Copy:
    version: int
    weight: Tensor
    """A view of the weight, which keeps its memory from being reused while the copy is kept."""
    copy: Tensor
    sample: Tensor
    """Some numbers of the weight when it was cast."""


class WeightCopies:
    """The cast copies of one model's weights."""

    def __init__(self, switch: Switch, report: Report) -> None:
        self._keeps = switch is True
        """With `auto`, copies are kept once gradients are found to be accumulated."""
        self._report = report
        self._copies: dict[Key, _Copy] = {}
        weak = ref(self)

        def before_step(*_: object) -> None:
            if (copies := weak()) is not None:
                copies.clear()

        finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def clear(self) -> None:
        """Drop all copies."""
        self._copies.clear()

    @torch.no_grad()
    def cast(self, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Returns each weight in its type of `dtypes`."""
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
        if kept is not None and kept.version == version and torch.equal(kept.sample, _sample(weight)):
            self._report.counters["weight copies used again"] += 1
            return kept.copy
        copy = weight.to(dtype)
        if self._keeps and version is not None:
            self._copies[key] = _Copy(version, weight.detach(), copy, _sample(weight).clone())
        return copy

    def _record(self) -> None:
        size = sum(each.copy.nbytes for each in self._copies.values()) / 2**20
        effect = f"copies of {len(self._copies)} weights ({size:.1f} MiB) are kept between micro-batches"
        self._report.applied(FEATURE, effect)


def _sample(weight: Tensor) -> Tensor:
    """Returns numbers that are spread over a weight."""
    dense = weight.detach() if weight.is_contiguous() else weight.detach().transpose(0, -1).contiguous()
    return dense.flatten()[:: max(weight.numel() // SAMPLED_NUMBERS, 1)]
