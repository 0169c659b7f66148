"""A slow method of somebody else's optimizer, ours in its place, and the trial that shows that both answer the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Answer = bool | float | Tensor | None
Method = Callable[..., Any]

RELATIVE_ERROR = 1e-6
"""How far norms may be apart: sums of squares in another order, rounded to fp32."""


@dataclass(frozen=True)
class Replacement:
    """One method, and how it is tried."""

    owner: Any
    """The object whose method it is."""
    name: str
    ours: Method
    trial: Callable[[Method], list[Answer]]
    """Calls a method on made-up gradients, leaves the owner as it was, and returns what the method answered."""

    def is_in_place(self) -> bool:
        """Whether it was installed before."""
        return getattr(getattr(self.owner, self.name), "_from_ort_accel", False)

    def difference(self) -> str:
        """Why ours cannot stand for the original; empty if both answer the same. Both are always called equally often.

        A trial may talk to other processes, so it is one on all of them.
        """
        answers, failures = [], []
        for method in (getattr(self.owner, self.name), self.ours):
            try:
                answers.append(self.trial(method))
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
        if failures:
            return f"{self.name} could not be tried ({failures[0]})"
        for number, (theirs, mine) in enumerate(zip(*answers, strict=True)):
            if not _equal(theirs, mine):
                return f"{self.name} answered {_shown(theirs)} and ours {_shown(mine)} in trial {number}"
        return ""

    def install(self) -> None:
        """Put ours in place, on this object only."""

        def replaced(*args: Any, **named: Any) -> Any:
            return self.ours(*args, **named)

        replaced._from_ort_accel = True  # type: ignore[attr-defined]
        setattr(self.owner, self.name, replaced)


@dataclass(frozen=True)
class Finding:
    """What a framework's optimizer offers to be replaced, or why there is nothing to replace."""

    maker: str
    replacements: tuple[Replacement, ...] = ()
    refusal: str = ""
    agree: Callable[[bool], bool] = bool
    """Makes all processes that train together replace a method, or none of them."""


def made_up(count: int, like: torch.dtype, device: torch.device, seed: int) -> list[Tensor]:
    """Small gradients of assorted sizes, equal in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1 + index % 5, generator=generator).to(device, like) for index in range(count)]


def spoiled(grads: list[Tensor]) -> list[list[Tensor]]:
    """Gradients as they are, and with an infinite or missing number in the first, the middle, or the last of them."""
    cases = [grads, [torch.zeros_like(grad) for grad in grads]]
    for where in sorted({0, len(grads) // 2, len(grads) - 1}) if grads else ():
        for bad in (math.inf, -math.inf, math.nan):
            case = [grad.clone() for grad in grads]
            case[where][-1] = bad
            cases.append(case)
    return cases


def _equal(theirs: Answer, mine: Answer) -> bool:
    if theirs is None or mine is None:
        return theirs is mine
    first, second = (torch.as_tensor(answer).detach().double().cpu().reshape(-1) for answer in (theirs, mine))
    return first.shape == second.shape and torch.allclose(first, second, rtol=RELATIVE_ERROR, atol=0, equal_nan=True)


def _shown(answer: Answer) -> str:
    return str(answer.tolist()) if isinstance(answer, Tensor) else str(answer)
