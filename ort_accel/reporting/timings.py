"""Alternatives that were timed against each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Race:
    """Alternatives that were timed against each other, and the chosen one."""

    graph: str
    subject: str
    count: int
    """The number of nodes that the choice holds for."""
    seconds: dict[str, float]
    chosen: str


KERNELS_AWAITED = "segments that wait for generated code"
KERNELS_READY, KERNELS_TRIED = "segments with generated code", "segments whose generated code was tried"
"""Counters. While the second is greater than the third, segments run with and without generated code in turn. A segment
counts once for each kind of code."""
KERNEL_NODES, PROGRAM_NODES = "nodes in generated kernels", "nodes in programs of Inductor"


ENGINE, EAGER = "ort_accel", "eager PyTorch"
"""The runners of a whole training step."""


@dataclass(frozen=True)
class StepComparison:
    """The last comparison of the engine's training steps with eager PyTorch's."""

    runner: str
    """The runner of the steps that follow: `ort_accel` or `eager PyTorch`."""
    ratio: float
    """The time of the engine's step as a multiple of eager PyTorch's; over the last pairs."""
    pairs: int
    """The number of pairs of steps compared since the training began."""
    step: int
    """The training step of the last comparison."""
    eager_seconds: float = 0.0
    """The time of forward and backward in eager PyTorch, the median of the compared steps; 0 if it is not known."""

    @property
    def is_on_engine(self) -> bool:
        return self.runner == ENGINE

    def __str__(self) -> str:
        took = f"a training step takes {self.ratio:.2f} times as long on the engine as in eager PyTorch"
        pairs = "1 pair" if self.pairs == 1 else f"{self.pairs} pairs"
        return f"{took} ({pairs} of steps, the last at step {self.step}); {self.runner} runs the next ones"
