"""Decides when evaluations beside a training are compiled.

Compiling takes seconds, and many evaluations take less in eager mode. So evaluations begin there, and are compiled once
they have taken as long as compiling is likely to take. That takes about twice as long as the best choice at most.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ort_accel.config.values import Switch
from ort_accel.reporting.report import Report

FEATURE = "engine.compile_evaluation"
COMPILE_SHARE = 0.5
"""Time to compile an evaluation, as a share of the time to compile a training step."""


class Evaluation:
    """Decides for a model's calls without gradients whether they run in eager mode."""

    def __init__(self, wish: Switch, may_wait: bool, report: Report) -> None:
        """`may_wait`: with the wish `auto`, compiling waits until it pays."""
        self._report = report
        self._allowed_s = 0.0
        """Seconds that eager mode may take; none before a training step was compiled."""
        self._spent_s = 0.0
        self._wish = wish if wish != "auto" or may_wait else True
        if self._wish is True:
            report.applied(FEATURE, "each is compiled at once")
        elif self._wish is False:
            report.off(FEATURE, "switched off: calls without gradients run in eager mode")
        else:
            report.off(FEATURE, "there was none beside a training yet")

    @property
    def is_in_eager(self) -> bool:
        """True if the next call is to run in eager mode."""
        if torch.is_grad_enabled() or self._wish is True:
            return False
        return self._wish is False or self._spent_s < self._allowed_s

    @contextmanager
    def in_eager(self) -> Iterator[None]:
        """Time a call in eager mode, and report what follows from that."""
        begin = time.perf_counter()
        yield
        self._report.counters["calls without gradients in eager mode"] += 1
        self._spent_s += time.perf_counter() - begin
        if self._wish is False:
            return
        took = f"they took {self._spent_s:.1f} s in eager mode"
        if self.is_in_eager:
            self._report.off(FEATURE, f"{took} so far, and compiling would take about {self._allowed_s:.1f} s")
        else:
            self._report.applied(FEATURE, f"from the next on, since {took}, and compiling takes about as long")

    def compiled_a_step(self, seconds: float) -> None:
        """Take in how long a call took that compiled something."""
        if torch.is_grad_enabled():
            self._allowed_s = max(self._allowed_s, COMPILE_SHARE * seconds)
