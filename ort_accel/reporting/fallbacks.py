"""The operators that PyTorch's kernels compute, with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar


class Reason(StrEnum):
    """The reason why PyTorch runs an operator."""

    UNSUPPORTED_OP = "unsupported operator"
    UNSUPPORTED_DTYPE = "unsupported dtype"
    DATA_DEPENDENT = "data-dependent shape"
    CHECK = "checks what a tensor holds"
    RANDOM = "random"
    ATTENTION = "attention"
    ONE_STEP = "many operators in one step"
    SLOWER = "slower by measurement"
    SLOWER_ELSEWHERE = "slower by measurements on other machines"
    SMALL = "too small to be worth a crossing"
    NEIGHBOUR = "next to what PyTorch runs faster"
    MUTATION = "changes its input"
    GRAPH_BREAK = "not captured"
    NOT_COMPILED = "failed to compile"
    WISH = "asked for in the configuration"
    FAILED = "failed in ONNX Runtime"
    ELSEWHERE = "on another device"
    ENDED_RUNS = "ended earlier runs in ONNX Runtime"

    @property
    def is_choice(self) -> bool:
        """True if PyTorch runs the operator by choice, False if ONNX Runtime cannot."""
        return self in CHOICES


CHOICES = {
    Reason.CHECK,
    Reason.RANDOM,
    Reason.ATTENTION,
    Reason.ONE_STEP,
    Reason.SLOWER,
    Reason.SLOWER_ELSEWHERE,
    Reason.SMALL,
    Reason.NEIGHBOUR,
    Reason.WISH,
    Reason.ELSEWHERE,
}


@dataclass(frozen=True)
class Fallback:
    """An operator that PyTorch's kernel computes, the reason, and the number of nodes."""

    op: str
    reason: Reason
    count: int
    detail: str = ""
    where: str = field(default="", compare=False)
    """The first line of the model's code that uses the operator."""
    is_called: bool = False
    """True if a session of ONNX Runtime calls PyTorch's kernel. The graph is not cut there."""

    @property
    def is_forced(self) -> bool:
        """True if the node runs outside ONNX Runtime's sessions because ONNX Runtime cannot run it."""
        return not self.is_called and not self.reason.is_choice


class Fallbacks(list[Fallback]):
    """A list of fallbacks that shows itself as a table: as text, and in a notebook."""

    as_table: ClassVar[Callable[[Sequence[Fallback]], str]] = list.__repr__
    as_html: ClassVar[Callable[[Sequence[Fallback]], str]] = list.__repr__
    """The renderers; `observe` sets them, since this room is below it."""

    def __repr__(self) -> str:
        return type(self).as_table(self)

    def _repr_html_(self) -> str:
        return type(self).as_html(self)
