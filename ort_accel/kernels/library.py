"""The torch library in which each kernel file defines its operators, as `torch.ops.ort_accel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library
from torch.library import register_fake as _register_fake

_LIBRARY = Library("ort_accel", "DEF")  # type: ignore[no-untyped-call]

ANY_DEVICE = "CompositeExplicitAutograd"
"""The dispatch key of a kernel that is written in PyTorch's own operators."""

Kernel = Callable[..., Any]


def define(schema: str, kernel: Kernel, *dispatch_keys: str, tags: Sequence[torch.Tag] = ()) -> None:
    """Define an operator, and its kernel for these dispatch keys."""
    _LIBRARY.define(schema, tags=tuple(tags))  # type: ignore[no-untyped-call]
    for key in dispatch_keys:
        _LIBRARY.impl(schema.partition("(")[0], kernel, key)  # type: ignore[no-untyped-call]


def fake(name: str) -> Callable[[Kernel], Kernel]:
    """Register the decorated function as an operator's fake, which returns empty results of the right form."""
    return _register_fake(f"ort_accel::{name}")  # type: ignore[no-any-return]  # torch leaves it untyped
