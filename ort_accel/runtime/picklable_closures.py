"""Functions that are made by functions, with a note of how, so that another process can make the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Made = TypeVar("Made", bound=Callable[..., Any])


def made_by(function: Made, make: Callable[..., Any], *arguments: Any) -> Made:
    """The function, which says that `make` makes it from these arguments (`made_by`)."""
    function.made_by = make, arguments  # type: ignore[attr-defined]
    return function
