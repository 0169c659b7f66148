"""Closures that record the call that made them, so that another process can make the same closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Closure = TypeVar("Closure", bound=Callable[..., object])


def picklable_by(closure: Closure, factory: Callable[..., object], *arguments: object) -> Closure:
    """Returns the closure with the attribute `made_by`: the factory and the arguments that make it again."""
    closure.made_by = factory, arguments  # type: ignore[attr-defined]
    return closure
