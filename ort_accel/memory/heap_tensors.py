"""CPU tensors in unaligned malloc blocks, so that glibc can reuse a freed block for the next tensor of its size."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import cast

import torch

ALIGNMENT_BYTES = 64
"""Bytes. Tensors begin at a multiple of this, as PyTorch's do."""

LEAST_BYTES = 128 << 10
"""Bytes. PyTorch allocates smaller tensors: small objects fill the gaps between them."""

_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.argtypes, _new_bytearray.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object


def empty_in_heap(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialized tensor on the CPU.

    PyTorch asks for aligned memory. Before version 2.39, glibc cuts an aligned block out of a larger one and does not
    merge the rest with it again. The freed block is then too small for the next one of its size. The block here is
    larger by the alignment, and the tensor begins at the aligned address within it.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    try:
        block = cast("bytearray", _new_bytearray(None, size + ALIGNMENT_BYTES))  # without content, it is not filled
    except MemoryError:
        return torch.empty(shape, dtype=dtype, device="cpu")  # its error says how much was asked for
    start = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % ALIGNMENT_BYTES
    flat = torch.frombuffer(block, dtype=dtype, count=size // dtype.itemsize, offset=start)
    return flat.resize_(shape)  # a view that is made without gradients could not be written to with gradients


def contiguous_in_heap(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor: the given one, or a copy of it."""
    if tensor.is_contiguous() or tensor.device.type != "cpu":
        return tensor.contiguous()
    return empty_in_heap(tensor.shape, tensor.dtype).copy_(tensor)
