"""What a model asks of numbers in tensors, such as that there are as many tokens for pictures as parts of them."""

from __future__ import annotations

from typing import Any


class CheckFailed(RuntimeError):
    """A number is not what the model asks for. Eager mode says in the model's own words what is wrong."""


def check(holds: Any, text: str) -> None:
    """Raise an error unless it holds."""
    if not holds:
        raise CheckFailed(text)
