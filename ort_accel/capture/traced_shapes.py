"""Frees what PyTorch keeps of a trace once Dynamo has compiled it, so that a deleted model leaves nothing behind.

A `ShapeEnv` holds the fake inputs that Dynamo builds guards from. Their dynamic sizes hold the `ShapeEnv` from C++, and
Python's garbage collector does not see this cycle. The `ShapeEnv` also holds the cache of fake results, which nothing
reads after the compilation. Private to torch; checked with torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_NOTED: ContextVar[list[ShapeEnv] | None] = ContextVar("shapes of graphs that Dynamo is compiling", default=None)


def shape_env() -> ShapeEnv | None:
    """Return the shapes of the graph that is being captured; None if it has none."""
    context = TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    return None if mode is None else mode.shape_env


def note_shapes() -> None:
    """Note the shapes of the graph that Dynamo hands to its backend."""
    shapes, noted = shape_env(), _NOTED.get()
    if shapes is not None and noted is not None:
        noted.append(shapes)


@contextmanager
def freed_traces() -> Iterator[None]:
    """Free the fake tensors of the traces that are noted in this context, when their guards have been built."""
    noted: list[ShapeEnv] = []
    before = _NOTED.set(noted)
    try:
        yield
    finally:
        _NOTED.reset(before)
        for shapes in noted:
            shapes.tracked_fakes = None
            shapes.fake_tensor_cache.clear()
