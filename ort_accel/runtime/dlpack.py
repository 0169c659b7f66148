"""Tensors between torch and ONNX Runtime, by DLPack: the same memory on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ort_accel.memory.heap_tensors import packed
from ort_accel.runtime.import_ort import native as ort

OrtValue = Any
OrtValues = Any


def to_ort(tensor: torch.Tensor) -> OrtValue:
    """The tensor's memory as an OrtValue, which keeps it alive. Only a tensor with gaps between elements is copied."""
    plain = packed(tensor.detach()) if tensor.numel() else tensor.new_empty(tensor.shape)  # with plain strides
    is_bool = plain.dtype == torch.bool
    return ort.OrtValue.from_dlpack(to_dlpack(plain.view(torch.uint8) if is_bool else plain), is_bool)


def sizes_to_ort(sizes: Sequence[int], *, scalar: bool) -> OrtValue:
    """Sizes as an int64 OrtValue."""
    return to_ort(torch.tensor(sizes[0] if scalar else sizes, dtype=torch.int64))


def to_torch(values: OrtValues, count: int) -> list[torch.Tensor]:
    """The results of a run as tensors that own ONNX Runtime's memory."""
    tensors = [from_dlpack(values.dlpack_at(index)) for index in range(count)]
    for index in values.bool_tensor_indices():
        tensors[index] = tensors[index].view(torch.bool)
    return tensors


class Bound:
    """The OrtValue of a tensor that usually keeps its place, such as a parameter; made anew when it has moved."""

    __slots__ = ("_place", "_value")

    def __init__(self) -> None:
        self._place: tuple[int, torch.Size] | None = None
        self._value: OrtValue = None

    def value(self, tensor: torch.Tensor) -> OrtValue:
        """The OrtValue of this tensor."""
        place = (tensor.data_ptr(), tensor.shape)
        if place != self._place or not tensor.is_contiguous():
            self._value, self._place = to_ort(tensor), place
        return self._value
