"""Hands tensors of PyTorch to a session by their addresses, so that their memory is free after their last use."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx
from torch._C._aoti import alloc_tensor_by_stealing_from_void_ptr, unsafe_alloc_void_ptrs_from_tensors

from ort_accel.executor.program import Symbols
from ort_accel.graph.symbolic_sizes import SizeFunction, expression
from ort_accel.native.library import native_library
from ort_accel.runtime.dlpack import OrtValue, to_ort

_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.argtypes, _pointer_in.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


class Frame:
    """The tensors that the calls of one session read."""

    def __init__(self, nodes: Sequence[fx.Node], readers: Sequence[int]) -> None:
        """`readers` has the number of calls that read each tensor."""
        fakes = [node.meta["val"] for node in nodes]
        self._ranks = [fake.ndim for fake in fakes]
        self._strides = SizeFunction(expression(stride) for fake in fakes for stride in fake.stride())
        self._readers = list(readers)

    @property
    def sizes(self) -> tuple[object, ...]:
        """Returns the sizes that it depends on."""
        return self._strides.sizes

    @contextmanager
    def open(self, tensors: list[torch.Tensor], symbols: Symbols) -> Iterator[OrtValue]:
        """Yields the frame as an input of the session. The list is emptied: the frame holds the tensors alone.

        The list gets them back if the run fails before any call has read them.
        """
        self._lay_out(tensors, symbols)
        capsules = unsafe_alloc_void_ptrs_from_tensors(tensors)
        tensors.clear()
        frame = torch.tensor([_pointer_in(capsule, None) for capsule in capsules] + self._readers)
        try:
            yield to_ort(frame)
        except Exception:
            if frame[len(capsules) :].tolist() == self._readers:
                tensors += map(alloc_tensor_by_stealing_from_void_ptr, capsules)
            raise
        finally:
            library = native_library()
            assert library is not None
            if not tensors:
                library.ort_accel_release(frame.data_ptr(), len(self._readers))

    def _lay_out(self, tensors: list[torch.Tensor], symbols: Symbols) -> None:
        """Replaces tensors that do not lie in memory as the graph was compiled for."""
        strides = iter(self._strides(symbols))
        for position, (tensor, rank) in enumerate(zip(tensors, self._ranks, strict=True)):
            wanted = tuple(next(strides) for _ in range(rank))
            if tensor.stride() != wanted and tensor.numel() > 1:
                tensors[position] = torch.empty_strided(tensor.shape, wanted, dtype=tensor.dtype).copy_(tensor)
