"""How a tensor lies in memory: eager mode's views leave permuted tensors, ONNX Runtime knows contiguous ones only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ort_accel.graph.symbolic_sizes import expression, hint

Order = tuple[int, ...]


def order_in_memory(fake: torch.Tensor) -> Order | None:
    """The dimensions from the outermost in memory to the innermost; None for a plain tensor, or one with gaps."""
    strides = fake.stride()
    order = sorted(range(fake.ndim), key=lambda dim: (-hint(strides[dim]), dim))
    moving = [dim for dim in order if expression(fake.shape[dim]) != 1]
    return tuple(order) if moving != sorted(moving) and _is_dense(fake, moving) else None


def is_plain(fake: torch.Tensor) -> bool:
    """Whether a tensor lies in memory as its dimensions say, without gaps."""
    return _is_dense(fake, [dim for dim in range(fake.ndim) if expression(fake.shape[dim]) != 1])


def _is_dense(fake: torch.Tensor, moving: Sequence[int]) -> bool:
    """Whether nothing lies between the elements, if these are the dimensions from the outermost to the innermost."""
    expected: int | torch.SymInt = 1
    for dim in reversed(moving):
        if expression(fake.stride(dim)) != expression(expected):
            return False
        expected = expected * fake.shape[dim]
    return True


def reverse(order: Order) -> Order:
    """The permutation that undoes this one."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
