"""Whether the engine is what has something captured: what it changes of Dynamo is changed for that alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CAPTURES: ContextVar[bool] = ContextVar("whether the engine is what has something captured", default=False)


@contextmanager
def by_engine() -> Iterator[None]:
    """While this is entered, what is captured is captured by the engine."""
    before = _CAPTURES.set(True)
    try:
        yield
    finally:
        _CAPTURES.reset(before)


def is_by_engine() -> bool:
    """Whether the present capture is the engine's."""
    return _CAPTURES.get()
