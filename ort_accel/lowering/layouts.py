"""How a tensor lies in memory: eager mode's views leave permuted tensors, ONNX Runtime knows contiguous ones only."""

from __future__ import annotations

import torch

from ort_accel.lowering.sizes import expression, hint

Order = tuple[int, ...]


def order_in_memory(fake: torch.Tensor) -> Order | None:
    """The dimensions from the outermost in memory to the innermost; None for a plain tensor, or one with gaps."""
    strides = fake.stride()
    order = sorted(range(fake.ndim), key=lambda dim: (-hint(strides[dim]), dim))
    moving = [dim for dim in order if expression(fake.shape[dim]) != 1]
    if moving == sorted(moving):
        return None
    expected: int | torch.SymInt = 1
    for dim in reversed(moving):
        if expression(strides[dim]) != expression(expected):
            return None
        expected = expected * fake.shape[dim]
    return tuple(order)


def reverse(order: Order) -> Order:
    """The permutation that undoes this one."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
