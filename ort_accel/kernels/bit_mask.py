"""Operators that store a boolean mask with eight elements in a byte, and restore it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy
import torch
from torch import Tensor, fx

from ort_accel.kernels.library import define, fake

own = torch.ops.ort_accel

BITS_PER_BYTE = 8


def is_bit_mask_op(node: fx.Node) -> bool:
    """True if a node turns a mask into bits or back."""
    return node.target in (own.to_bits.default, own.from_bits.default)


def _to_bits(mask: Tensor) -> Tensor:
    return torch.from_numpy(numpy.packbits(mask.contiguous().view(torch.uint8).view(-1).numpy()))


def _from_bits(bits: Tensor, size: Sequence[int]) -> Tensor:
    return torch.from_numpy(numpy.unpackbits(bits.numpy(), count=prod(size))).view(torch.bool).view(size)


define("to_bits(Tensor mask) -> Tensor", _to_bits, "CPU")
define("from_bits(Tensor bits, SymInt[] size) -> Tensor", _from_bits, "CPU")


@fake("to_bits")
def _(mask: Tensor) -> Tensor:
    return mask.new_empty([(mask.numel() + BITS_PER_BYTE - 1) // BITS_PER_BYTE], dtype=torch.uint8)


@fake("from_bits")
def _(bits: Tensor, size: Sequence[int]) -> Tensor:
    return bits.new_empty(size, dtype=torch.bool)
