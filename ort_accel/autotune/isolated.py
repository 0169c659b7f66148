"""Running real tensors while a graph is compiled, without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ort_accel.runtime.device import Place


@contextmanager
def unnoticed(place: Place) -> Iterator[None]:
    """Run real tensors while all around is traced, and leave the random numbers as they are."""
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast(place.kind, enabled=False),
        torch.random.fork_rng(devices=[place.index] if place.is_cuda else []),
    ):
        yield
