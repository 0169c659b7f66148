"""What a model asks of numbers in tensors, such as that there are as many tokens for pictures as parts of them."""

from __future__ import annotations

from typing import Any

FAILED = "what the model checks does not hold"
"""What a check that failed says. Eager mode says it in the model's own words."""


class CheckFailed(RuntimeError):
    """A number is not what the model asks for."""


def check(holds: Any, text: str) -> None:
    """Raise an error unless it holds."""
    if not holds:
        raise CheckFailed(text)


def is_failed_check(error: Exception) -> bool:
    """Whether a check failed, in a compiled graph or in one that runs as it was captured."""
    return isinstance(error, CheckFailed) or (isinstance(error, RuntimeError) and FAILED in str(error))
