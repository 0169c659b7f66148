"""The density of batches, and the work of processes and of batching schemes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadBalance:
    """The work of each process in the steps of an epoch: a row for each step, a number for each process."""

    before: list[list[float]]
    """The work without balancing."""
    after: list[list[float]]
    every: int
    """The distance between two steps that are kept here."""
    waiting_before: float
    """The share of all processes' time spent waiting for the slowest process, over all steps."""
    waiting_after: float


@dataclass(frozen=True)
class InputDensity:
    """The valid share of one input of one batch."""

    step: int
    kind: str
    """EMBED for tokens, LABEL for labels."""
    name: str
    pad: int | None
    """The value at positions that do not count, if known."""
    valid: int
    total: int
    rows: tuple[int, ...]
    """The number of valid tokens in each row."""

    @property
    def density(self) -> float:
        """Returns the valid share."""
        return self.valid / self.total


@dataclass(frozen=True)
class BatchingScheme:
    """A batching scheme, and the FLOPs that it spends on all inspected batches."""

    name: str
    flops: float
    """Estimated FLOPs of forward and backward."""


@dataclass(frozen=True)
class Inspection:
    """The density of inspected batches, and the FLOPs of other batching schemes."""

    rows: list[InputDensity]
    """The inputs of the batches since the previous table."""
    batches: int
    """The number of batches behind the other figures."""
    ways: list[BatchingScheme]
    """The schemes, dense first; the last one computes valid tokens only."""
    processes: int
    waiting: tuple[float, float] | None
    """The shares of time that the processes would wait for the slowest, without and with load balancing."""
