"""Kernels in Python: they compute a cluster by PyTorch's operators, where a session calls a generated kernel."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ort_accel.generated.clusters import Cluster
from ort_accel.generated.description import Description, Layout
from ort_accel.generated.worker import Value
from ort_accel.native.library import native_library

_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(Value))
_ALIVE: list[Any] = []
"""Sessions keep the addresses of kernels as long as the process runs."""


class PythonKernel:
    """A kernel that is known under a name to the sessions that are created from now on."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self._described = Description(cluster.source, name)
        self._counts = len(cluster.inputs), len(cluster.outputs), len(cluster.symbols)
        self.calls: list[list[int]] = []
        """The sizes that each call got."""
        self.fails = False
        function = _KERNEL(self._call)
        _ALIVE.append(function)
        library = native_library()
        assert library is not None
        library.ort_accel_add_kernel(name.encode(), ctypes.cast(function, ctypes.c_void_p))

    def _call(self, values: Any) -> int:
        inputs, outputs, symbols = self._counts
        sizes = [values[inputs + outputs + at].integer for at in range(symbols)]
        self.calls.append(sizes)
        if self.fails:
            return 1
        given = [tensor_at(values[at].pointer, each) for at, each in enumerate(self._described.inputs(*sizes))]
        results = self._described.run(*sizes, *given)
        for at, (layout, result) in enumerate(zip(self._described.outputs(*sizes), results, strict=True)):
            tensor_at(values[inputs + at].pointer, layout).copy_(result)
        return 0


def tensor_at(address: int, layout: Layout) -> Tensor:
    """The tensor that lies at an address."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
    if math.prod(layout.shape) == 0:
        return torch.empty(layout.shape, dtype=layout.dtype)
    memory = (ctypes.c_char * (elements * layout.dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=layout.dtype).as_strided(layout.shape, layout.strides)


def in_python(clusters: Mapping[str, Sequence[Cluster]]) -> dict[str, PythonKernel]:
    """Makes the kernels of clusters known under their names."""
    return {name: PythonKernel(name, equal[0]) for name, equal in clusters.items()}
