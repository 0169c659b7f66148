"""Plain records of the memory of a training step: recomputation plans, predicted and measured peaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class PlanKind(IntEnum):
    """What is done with what the forward keeps; a user's plans ask for the first three."""

    OFF = 0
    RECOMPUTE = 1
    COMPROMISE = 2
    """Compute again from a copy of a smaller type, which is kept."""
    OFFLOAD = 3
    """Move to host memory and back."""


@dataclass(frozen=True)
class PlanRow:
    """What computing a cluster of operators again would save and cost, and whether that is done."""

    cluster: str
    kind: PlanKind
    requested: int
    """How many places were asked for; 0 where nobody asked, -1 for all."""
    applied: int
    frequency: int
    """How many places there are."""
    saving: int
    """Bytes that all its places would save, at the sizes that the graph was compiled with."""
    symbolic: str
    """The same with the names of the sizes that can change."""
    cost_ms: float
    """Milliseconds that computing all its places again, or moving them alone, would take, estimated."""
    shapes: tuple[str, ...]
    """Types and sizes of what it saves, in one place."""


@dataclass(frozen=True)
class Peak:
    """The most memory of a step, predicted for one choice of what is computed again or moved to host memory."""

    bytes: int
    resident: int
    """Those of parameters, buffers, inputs and optimizer states, which are there all the time."""
    cost_ms: float
    """Milliseconds that computing again and moving take in every step, estimated."""


@dataclass(frozen=True)
class MemoryStage:
    """What is in memory at the highest moment of one segment of a step, or of the optimizer's step, as predicted."""

    phase: str
    """`forward`, `backward` or `optimizer`."""
    amounts: dict[str, int]
    """Bytes by what they are for; the same names in every stage, and `group: part` where a group has several."""


@dataclass(frozen=True)
class MeasuredPeak:
    """The most memory of a step, as it was measured."""

    step: int
    held: int
    """Bytes of parameters, buffers, optimizer states and gradients that were there before the step."""
    bytes: int
    """By how many bytes the resident set of the process grew in the step at most."""
    in_use: int | None = None
    """By how many bytes what is in use grew at most, as the C library counts it: without what was freed and is kept."""


@dataclass
class GraphMemory:
    """What one pair of forward and backward graphs keeps, computes again, moves, packs, and takes."""

    graph: str
    level: str
    plans: list[PlanRow] = field(default_factory=list)
    layers: int = 0
    stash_without: int = 0
    """Bytes kept for the backward if nothing is computed again."""
    stash: int = 0
    """Bytes that are kept, as all bytes here at the sizes that the graph was compiled with."""
    repeated: int = 0
    """How many operators are computed again."""
    cost_ms: float = 0.0
    """Milliseconds that this takes in every step, estimated."""
    moved: int = 0
    """Bytes that are moved to host memory, and back, in every step."""
    moving_ms: float = 0.0
    """Milliseconds that a step takes longer for it, estimated."""
    bits: int = 0
    """Bytes of masks that are kept with eight elements in a byte."""
    masks: int = 0
    """Bytes that these masks take otherwise."""
    symbols: dict[str, int] = field(default_factory=dict)
    """The sizes that can change, as they were."""
    frontier: list[Peak] = field(default_factory=list)
    """The choices that were tried, the last one made; the first one computes nothing again that the model does not ask
    for. Empty where nobody asked for predictions."""
    stages: list[MemoryStage] = field(default_factory=list)
    """The step as it was chosen, in the order of running. Empty where nobody asked for predictions."""
