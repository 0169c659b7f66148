"""`engine.skip_checks`: what Dynamo checks before each call, left out for calls that were checked before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ort_accel.capture.dynamo import without_checks
from ort_accel.reporting import Report

PLAIN = (bool, int, float, str, type(None))


class Checks:
    """Knows which calls were checked since anything was compiled."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._checked: dict[Any, int] = {}
        """For each kind of call, how many graphs there were when it was last checked and compiled none."""

    @contextmanager
    def skipped_where_known(self, leaves: Sequence[Any], mode: object) -> Iterator[None]:
        """For a call with these inputs: Dynamo checks it only if it is new, or something was compiled since."""
        kind, compiled = self._kind(leaves, mode), self._compiled
        if kind is not None and self._checked.get(kind) == compiled:
            self._report.counters["calls without checks"] += 1
            with without_checks():
                yield
            return
        yield
        if kind is not None and self._compiled == compiled:
            self._checked[kind] = compiled

    @property
    def _compiled(self) -> int:
        return self._report.counters["compilations"]

    def _kind(self, leaves: Sequence[Any], mode: object) -> Any:
        """What tells calls apart, as far as the call itself shows it; None if it holds what cannot be compared."""
        parts = [_part(leaf) for leaf in leaves]
        if None in parts:
            return None
        casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        return mode, torch.is_grad_enabled(), *casts, *parts


def _part(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, nn.Module):
        return id(leaf), leaf.training
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else None
