"""Tells contiguous tensors from permuted ones: eager mode's views are permuted, ONNX Runtime needs contiguous ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ort_accel.graph.symbolic_sizes import expression, hint, same_stride

Order = tuple[int, ...]


def permuted_order(fake: torch.Tensor) -> Order | None:
    """Returns the dimensions from the outermost in memory to the innermost; None if contiguous, or with gaps.

    Dimensions with one entry come first: their strides mean nothing, and may differ between tensors that lie alike.
    """
    strides = fake.stride()
    short = [dim for dim in range(fake.ndim) if expression(fake.shape[dim]) == 1]
    long_dims = sorted(set(range(fake.ndim)).difference(short), key=lambda dim: (-hint(strides[dim]), dim))
    return (*short, *long_dims) if long_dims != sorted(long_dims) and _is_dense(fake, long_dims) else None


def is_plain(fake: torch.Tensor) -> bool:
    """True if a tensor is contiguous."""
    return _is_dense(fake, [dim for dim in range(fake.ndim) if expression(fake.shape[dim]) != 1])


def has_no_gaps(fake: torch.Tensor) -> bool:
    """True if a tensor is contiguous, or is with its dimensions in another order."""
    return is_plain(fake) or permuted_order(fake) is not None


def _is_dense(fake: torch.Tensor, long_dims: Sequence[int]) -> bool:
    """True if elements have no gaps, given the dimensions longer than 1 from the outermost to the innermost."""
    expected: int | torch.SymInt = 1
    for dim in reversed(long_dims):
        if not same_stride(fake.stride(dim), expected):
            return False
        expected = expected * fake.shape[dim]
    return True


def have_same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of the same sizes lie alike in memory. Dimensions with one entry do not matter."""
    return all(
        expression(size) == 1 or same_stride(stride, wanted)
        for size, stride, wanted in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


def reverse(order: Order) -> Order:
    """Returns the inverse permutation."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
