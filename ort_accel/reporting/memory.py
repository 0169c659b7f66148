"""Plain records of the memory of a training step: recomputation plans, predicted and measured peaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class PlanKind(IntEnum):
    """The treatment of a value that the forward keeps; a user's plans ask for the first three."""

    OFF = 0
    RECOMPUTE = 1
    COMPROMISE = 2
    """Recompute from a copy of a smaller type, which is kept."""
    OFFLOAD = 3
    """Move to host memory and back."""


@dataclass(frozen=True)
class PlanRow:
    """The saving and cost of recomputing a cluster of operators, and the places where it is done."""

    cluster: str
    kind: PlanKind
    requested: int
    """The number of places asked for: 0 if the plan was not requested, -1 for all."""
    applied: int
    frequency: int
    """The number of places."""
    saving: int
    """Bytes that all places would save, at the sizes that the graph was compiled with."""
    symbolic: str
    """The same with the names of the sizes that can change."""
    cost_ms: float
    """Estimated milliseconds to recompute all places, or to move them."""
    shapes: tuple[str, ...]
    """Types and sizes of the values saved in one place."""


@dataclass(frozen=True)
class Peak:
    """The predicted peak of a step, for one choice of values to recompute or to offload."""

    bytes: int
    resident: int
    """Bytes of parameters, buffers, inputs and optimizer states, which stay during the step."""
    cost_ms: float
    """Estimated milliseconds that recomputation and offloading take in every step."""


@dataclass(frozen=True)
class MemoryStage:
    """The predicted memory at the peak of one segment of a step, or of the optimizer's step."""

    phase: str
    """`forward`, `backward` or `optimizer`."""
    amounts: dict[str, int]
    """Bytes by purpose. All stages have the same names, `group: part` where a group has several parts."""


@dataclass(frozen=True)
class MeasuredPeak:
    """The measured peak of a step."""

    step: int
    held: int
    """Bytes of parameters, buffers, optimizer states and gradients before the step."""
    bytes: int
    """The largest growth of the process's resident set in the step."""
    in_use: int | None = None
    """The largest growth of the C library's memory in use, which excludes freed blocks that it keeps."""


@dataclass
class GraphMemory:
    """The memory of one pair of forward and backward graphs."""

    graph: str
    level: str
    plans: list[PlanRow] = field(default_factory=list)
    layers: int = 0
    stash_without: int = 0
    """Bytes saved for the backward without recomputation."""
    stash: int = 0
    """Bytes saved for the backward. All bytes here are at the sizes that the graph was compiled with."""
    repeated: int = 0
    """The number of recomputed operators."""
    cost_ms: float = 0.0
    """Estimated milliseconds that recomputation takes in every step."""
    moved: int = 0
    """Bytes that are moved to host memory and back in every step."""
    moving_ms: float = 0.0
    """Estimated milliseconds that moving adds to a step."""
    bits: int = 0
    """Bytes of masks that are saved with eight elements in a byte."""
    masks: int = 0
    """Bytes that these masks would take unpacked."""
    symbols: dict[str, int] = field(default_factory=dict)
    """The dynamic sizes, with their values at compilation."""
    frontier: list[Peak] = field(default_factory=list)
    """The choices that were tried; the last one was made, and the first one recomputes only the model's checkpoints.
    Empty where predictions were not requested."""
    stages: list[MemoryStage] = field(default_factory=list)
    """The stages of the chosen step, in the order of running. Empty where predictions were not requested."""
    budget: int = 0
    """Bytes that `memory.budget` allows; 0 without a budget."""
