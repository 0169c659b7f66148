"""Values that lie in host memory for a while: copies from a device and back, beside what it computes.

On a CUDA device all copies are made on one stream of their own, one after the other, from and into pinned memory. That
memory comes from PyTorch's host allocator, which keeps it from step to step and gives it out again once the copies that
use it are done, and it belongs to the tensor that lies in it: it is free when that is, whoever held it, an autograd
graph whose backward ran once, twice or never.

Memory of the device is freed in the order of the stream that computes, so that a step takes the same however far the
device is behind: whoever reads a result, or lets go of a source, calls `settle` first. Marking a tensor as used by
another stream would not do: a tensor that ONNX Runtime made is none of PyTorch's allocator, which passes over it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class _Copy(NamedTuple):
    """A copy that may not have ended yet."""

    end: torch.cuda.Event
    source: Tensor
    result: Tensor
    """Held, as the source is, so that a step that fails in between leaves no copy writing into the memory of others."""


class HostMemory:
    """Where values of one device go and come back from."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._under_way: dict[int, _Copy] = {}
        """By the address of the result."""

    def send(self, value: Tensor) -> Tensor:
        """Begin to copy a value of the device; the result is there, and the value may go, once it is settled."""
        result = torch.empty_like(value, device="cpu", pin_memory=self._stream is not None)
        if result.stride() != value.stride():  # a part of another value; only between equal layouts no host waits
            value = value.clone()
        return self._begin(value, result)

    def fetch(self, kept: Tensor) -> Tensor:
        """Begin to copy a value back to the device; it may be read once it is settled."""
        return self._begin(kept, torch.empty_like(kept, device=self._device))

    def settle(self, result: Tensor) -> None:
        """What is computed from here on waits for this copy to end. The host does not."""
        copy = self._under_way.pop(result.data_ptr(), None)
        if copy is not None:
            torch.cuda.current_stream(self._device).wait_event(copy.end)

    def release(self) -> None:
        """Give pinned memory back that nothing lies in."""
        if self._stream is not None:
            empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache  # younger, older
            empty()

    def _begin(self, source: Tensor, result: Tensor) -> Tensor:
        if self._stream is None:
            return result.copy_(source)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result.copy_(source, non_blocking=True)
            end = self._stream.record_event()
        for address, copy in list(self._under_way.items()):  # of steps that failed before they settled it
            if copy.end.query():  # type: ignore[no-untyped-call]
                self._under_way.pop(address, None)
        self._under_way[result.data_ptr()] = _Copy(end, source, result)
        return result


@cache
def host_memory(device: torch.device) -> HostMemory:
    """That of a device, for all models on it."""
    return HostMemory(device)
