"""Operators that store a boolean mask with eight elements in a byte, restore it, and apply it as a dropout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy
import torch
from torch import Tensor, fx

from ort_accel.graph.memory_layout import is_plain
from ort_accel.kernels.kernel_call import KernelCall, Output, chosen_for, element_of, fake_of
from ort_accel.kernels.library import define, fake
from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import ELEMENTS, run_kernel

own = torch.ops.ort_accel

BITS_PER_BYTE = 8


def is_bit_mask_op(node: fx.Node) -> bool:
    """True if a node makes bits of a mask, or reads them."""
    return node.target in (own.to_bits.default, own.from_bits.default, own.apply_bits.default)


def bytes_of(count: int) -> int:
    """Returns the bytes of a mask with so many elements."""
    return (count + BITS_PER_BYTE - 1) // BITS_PER_BYTE


def to_bits(mask: Tensor) -> Tensor:
    """Returns a boolean mask with eight of its elements in a byte."""
    values = mask.contiguous().view(torch.uint8).view(-1)
    if native_library() is None:
        return torch.from_numpy(numpy.packbits(values.numpy(), bitorder="little"))
    bits = torch.empty(bytes_of(values.numel()), dtype=torch.uint8)
    run_kernel("pack_bits", values, values.numel(), bits)
    return bits


def _from_bits(bits: Tensor, size: Sequence[int]) -> Tensor:
    return (
        torch.from_numpy(numpy.unpackbits(bits.numpy(), count=prod(size), bitorder="little"))
        .view(torch.bool)
        .view(size)
    )


def _apply_bits(source: Tensor, bits: Tensor, scale: float) -> Tensor:
    element = ELEMENTS.get(source.dtype)
    if element is None or native_library() is None:
        return source.mul(_from_bits(bits, source.shape)).mul_(scale)
    source = source.contiguous()
    result = torch.empty_like(source)
    run_kernel("apply_dropout", source, bits, source.numel(), float(scale), element, result)
    return result


define("to_bits(Tensor mask) -> Tensor", to_bits, "CPU")
define("from_bits(Tensor bits, SymInt[] size) -> Tensor", _from_bits, "CPU")
define("apply_bits(Tensor source, Tensor bits, float scale) -> Tensor", _apply_bits, "CPU")


@fake("to_bits")
def _(mask: Tensor) -> Tensor:
    return mask.new_empty([bytes_of(mask.numel())], dtype=torch.uint8)


@fake("from_bits")
def _(bits: Tensor, size: Sequence[int]) -> Tensor:
    return bits.new_empty(size, dtype=torch.bool)


@fake("apply_bits")
def _(source: Tensor, bits: Tensor, scale: float) -> Tensor:
    return source.new_empty(source.shape)


@chosen_for(own.apply_bits.default)
def _apply_bits_call(_: fx.Node, source: fx.Node, mask: fx.Node, scale: float) -> KernelCall | None:
    element = element_of(source)
    if element is None or not is_plain(fake_of(source)):
        return None
    return KernelCall("apply_dropout", (source, mask, fake_of(source).numel(), float(scale), element, Output(0)))
