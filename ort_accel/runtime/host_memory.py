"""Copies of a device's values to host memory and back, beside the device's computation.

On a CUDA device all copies run on one stream of their own, from and to pinned memory of PyTorch's host allocator. That
memory is freed with its tensor, and reused once the copies that use it have ended.

The device's memory is freed in the order of the computing stream: a reader of a result, or an owner that drops a
source, calls `settle` first. `record_stream` would not suffice, since ONNX Runtime's tensors do not come from PyTorch's
allocator.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class _Copy(NamedTuple):
    """A copy that may still run."""

    end: torch.cuda.Event
    source: Tensor
    result: Tensor
    """Kept alive with the source: a copy must not write into freed memory after a step has failed."""


class HostMemory:
    """Host memory for the values of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pending: dict[int, _Copy] = {}
        """Copies by the address of their result."""

    def send(self, value: Tensor) -> Tensor:
        """Begin to copy a value to the host. After `settle`, the result may be read and the value dropped."""
        result = torch.empty_like(value, device="cpu", pin_memory=self._stream is not None)
        if result.stride() != value.stride():  # only a copy between equal layouts does not block the host
            value = value.clone()
        return self._begin(value, result)

    def fetch(self, kept: Tensor) -> Tensor:
        """Begin to copy a value back to the device. It may be read after `settle`."""
        return self._begin(kept, torch.empty_like(kept, device=self._device))

    def settle(self, result: Tensor) -> None:
        """Let the computing stream wait until this copy has ended; the host does not wait."""
        copy = self._pending.pop(result.data_ptr(), None)
        if copy is not None:
            torch.cuda.current_stream(self._device).wait_event(copy.end)

    def release(self) -> None:
        """Return unused pinned memory to the system."""
        if self._stream is not None:
            empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
            empty()

    def _begin(self, source: Tensor, result: Tensor) -> Tensor:
        if self._stream is None:
            return result.copy_(source)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result.copy_(source, non_blocking=True)
            end = self._stream.record_event()
        for address, copy in list(self._pending.items()):  # of steps that failed before they called `settle`
            if copy.end.query():  # type: ignore[no-untyped-call]
                self._pending.pop(address, None)
        self._pending[result.data_ptr()] = _Copy(end, source, result)
        return result


@cache
def host_memory(device: torch.device) -> HostMemory:
    """Returns the host memory that all models on a device share."""
    return HostMemory(device)
