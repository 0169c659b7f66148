"""Tensors in blocks as the C library cuts them, with no more asked of it than how large they are."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import cast

import torch

ALIGNMENT = 64
"""Bytes; what kernels like best."""

LEAST = 128 << 10
"""Smaller tensors are made as PyTorch makes them: their gaps are filled with small objects."""

_block = ctypes.pythonapi.PyByteArray_FromStringAndSize
_block.argtypes, _block.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object


def unfilled(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU, to be written to.

    PyTorch asks for memory at a multiple of 64 bytes. Before 2.39, glibc cuts such a block out of a larger one and does
    not join what is left over with it again. Once freed, the block is then a little too small for the next one of its
    size. Here the block is that much larger, and the tensor begins where it fits: freed, it is right for the next one.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    try:
        block = cast("bytearray", _block(None, size + ALIGNMENT))  # with no content given, it is not filled
    except MemoryError:
        return torch.empty(shape, dtype=dtype, device="cpu")  # whose error says how much was asked for
    start = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % ALIGNMENT
    flat = torch.frombuffer(block, dtype=dtype, count=size // dtype.itemsize, offset=start)
    return flat.resize_(shape)  # not a view: one that is made without gradients cannot be written over with them


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its elements one behind the other: itself, or a copy where they lie otherwise."""
    if tensor.is_contiguous() or tensor.device.type != "cpu":
        return tensor.contiguous()
    return unfilled(tensor.shape, tensor.dtype).copy_(tensor)
