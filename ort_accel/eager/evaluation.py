"""When evaluations beside a training are compiled.

Compiling takes seconds, and many an evaluation takes less in eager mode. So evaluations begin there, and are compiled
when they have taken as long in all as compiling is likely to take: that is never much more than twice the best choice
would have come to, however long they turn out to be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ort_accel.config.values import Switch
from ort_accel.reporting import Report

FEATURE = "engine.compile_evaluation"
SHARE = 0.5
"""What compiling for an evaluation takes of what compiling for a training step took. Measured on BERT, Llama and T5."""


class Evaluation:
    """How the calls without gradients run that a model gets beside its training."""

    def __init__(self, wish: Switch, may_wait: bool, report: Report) -> None:
        """`may_wait` says that time may decide, where nothing is wished."""
        self._report = report
        self._most = 0.0
        """Seconds of eager mode that are allowed; none as long as nothing was trained."""
        self._spent = 0.0
        self._wish = wish if wish != "auto" or may_wait else True
        if self._wish is True:
            report.applied(FEATURE, "each is compiled at once")
        elif self._wish is False:
            report.off(FEATURE, "switched off: calls without gradients run in eager mode")
        else:
            report.off(FEATURE, "there was none beside a training yet")

    @property
    def is_in_eager(self) -> bool:
        """Whether the next call is to run in eager mode."""
        if torch.is_grad_enabled() or self._wish is True:
            return False
        return self._wish is False or self._spent < self._most

    @contextmanager
    def in_eager(self) -> Iterator[None]:
        """Around a call in eager mode."""
        begin = time.perf_counter()
        yield
        self._report.counters["calls without gradients in eager mode"] += 1
        self._spent += time.perf_counter() - begin
        if self._wish is False:
            return
        took = f"they took {self._spent:.1f} s in eager mode"
        if self.is_in_eager:
            self._report.off(FEATURE, f"{took} so far, and compiling would take about {self._most:.1f} s")
        else:
            self._report.applied(FEATURE, f"from the next on, since {took}, and compiling takes about as long")

    def compiled_a_step(self, seconds: float) -> None:
        """Told of a call in training that compiled something, and of how long it took."""
        if torch.is_grad_enabled():
            self._most = max(self._most, SHARE * seconds)
