"""Tensors shared by torch and ONNX Runtime through DLPack, without copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ort_accel.memory.heap_tensors import contiguous_in_heap
from ort_accel.runtime.import_ort import native as ort

OrtValue: TypeAlias = ort.OrtValue
OrtValues: TypeAlias = ort.OrtValueVector

SHARES_BOOLEANS = not hasattr(OrtValues, "bool_tensor_indices")
"""True from onnxruntime 1.32 on. Before, booleans are shared as bytes with a flag."""


def to_ort(tensor: torch.Tensor) -> OrtValue:
    """Returns the tensor's memory as an OrtValue that keeps it alive. A tensor that is not contiguous is copied."""
    plain = (
        contiguous_in_heap(tensor.detach()) if tensor.numel() else tensor.new_empty(tensor.shape)
    )  # with plain strides
    if SHARES_BOOLEANS:
        return ort.OrtValue.from_dlpack(to_dlpack(plain))
    is_bool = plain.dtype == torch.bool
    return ort.OrtValue.from_dlpack(to_dlpack(plain.view(torch.uint8) if is_bool else plain), is_bool)


def sizes_to_ort(sizes: Sequence[int], *, scalar: bool) -> OrtValue:
    """Returns sizes as an int64 OrtValue."""
    return to_ort(torch.tensor(sizes[0] if scalar else sizes, dtype=torch.int64))


def to_torch(values: OrtValues, count: int) -> list[torch.Tensor]:
    """Returns the results of a run as tensors that own ONNX Runtime's memory."""
    tensors = [from_dlpack(values.dlpack_at(index)) for index in range(count)]
    for index in [] if SHARES_BOOLEANS else values.bool_tensor_indices():
        tensors[index] = tensors[index].view(torch.bool)
    return tensors


class CachedOrtValue:
    """The cached OrtValue of a tensor that rarely moves, such as a parameter."""

    __slots__ = ("_location", "_value")

    def __init__(self) -> None:
        self._location: tuple[int, torch.Size] | None = None
        self._value: OrtValue = None

    def value(self, tensor: torch.Tensor) -> OrtValue:
        """Returns the OrtValue of this tensor; a new one if the tensor has moved."""
        location = (tensor.data_ptr(), tensor.shape)
        if location != self._location or not tensor.is_contiguous():
            self._value, self._location = to_ort(tensor), location
        return self._value
