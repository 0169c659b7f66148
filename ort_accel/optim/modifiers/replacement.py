"""The replacement of a framework's slow method, and the trial that compares both methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Answer = bool | float | Tensor | None
Method = Callable[..., Any]
ForeignObject = Any
"""An object of a framework that has no types."""

RELATIVE_ERROR = 1e-6
"""The largest difference of norms, which sum squares in another order and are rounded to fp32."""


@dataclass(frozen=True)
class Replacement:
    """A replacement of one method, and its trial."""

    owner: ForeignObject
    """The object that has the method."""
    name: str
    ours: Method
    trial: Callable[[Method], list[Answer]]
    """Calls a method on synthetic gradients, restores the owner, and returns the method's answers."""

    def is_in_place(self) -> bool:
        """True if the replacement is installed."""
        return getattr(getattr(self.owner, self.name), "_from_ort_accel", False)

    def difference(self) -> str:
        """Returns how the answers of the replacement differ from the original's; empty if they are equal.

        Both methods are always called equally often, since a call may communicate with other processes.
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
        """Install the replacement on this object only."""

        def replaced(*args: object, **kwargs: object) -> object:
            return self.ours(*args, **kwargs)

        replaced._from_ort_accel = True  # type: ignore[attr-defined]
        setattr(self.owner, self.name, replaced)


@dataclass(frozen=True)
class Finding:
    """The replacements for a framework's optimizer, or the reason why there are none."""

    maker: str
    replacements: tuple[Replacement, ...] = ()
    refusal: str = ""
    agree: Callable[[bool], bool] = bool
    """Lets all processes that train together replace a method, or none of them."""


def synthetic_gradients(count: int, like: torch.dtype, device: torch.device, seed: int) -> list[Tensor]:
    """Returns small gradients of several sizes, equal in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1 + index % 5, generator=generator).to(device, like) for index in range(count)]


def with_nonfinite(grads: list[Tensor]) -> list[list[Tensor]]:
    """Returns the gradients, zeros, and copies with an infinity or NaN in the first, middle or last gradient."""
    cases = [grads, [torch.zeros_like(grad) for grad in grads]]
    for index in sorted({0, len(grads) // 2, len(grads) - 1}) if grads else ():
        for bad in (math.inf, -math.inf, math.nan):
            case = [grad.clone() for grad in grads]
            case[index][-1] = bad
            cases.append(case)
    return cases


def _equal(theirs: Answer, mine: Answer) -> bool:
    if theirs is None or mine is None:
        return theirs is mine
    first, second = (torch.as_tensor(answer).detach().double().cpu().reshape(-1) for answer in (theirs, mine))
    return first.shape == second.shape and torch.allclose(first, second, rtol=RELATIVE_ERROR, atol=0, equal_nan=True)


def _shown(answer: Answer) -> str:
    return str(answer.tolist()) if isinstance(answer, Tensor) else str(answer)
