"""Operators that keep a mask with eight elements in a byte, and make it anew."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor, fx
from torch.library import Library, register_fake

LIBRARY: Any = Library("ort_accel", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("to_bits(Tensor mask) -> Tensor")
LIBRARY.define("from_bits(Tensor bits, SymInt[] size) -> Tensor")

own = torch.ops.ort_accel

IN_A_BYTE = 8


def is_of_bits(node: fx.Node) -> bool:
    """Whether a node turns a mask into bits or back."""
    return node.target in (own.to_bits.default, own.from_bits.default)


def _to_bits(mask: Tensor) -> Tensor:
    return torch.from_numpy(numpy.packbits(mask.contiguous().view(torch.uint8).view(-1).numpy()))


def _from_bits(bits: Tensor, size: Sequence[int]) -> Tensor:
    return torch.from_numpy(numpy.unpackbits(bits.numpy(), count=prod(size))).view(torch.bool).view(size)


LIBRARY.impl("to_bits", _to_bits, "CPU")
LIBRARY.impl("from_bits", _from_bits, "CPU")


@register_fake("ort_accel::to_bits")  # type: ignore[untyped-decorator]
def _(mask: Tensor) -> Tensor:
    return mask.new_empty([(mask.numel() + IN_A_BYTE - 1) // IN_A_BYTE], dtype=torch.uint8)


@register_fake("ort_accel::from_bits")  # type: ignore[untyped-decorator]
def _(bits: Tensor, size: Sequence[int]) -> Tensor:
    return bits.new_empty(size, dtype=torch.bool)
