"""The device that sessions compute on: the CPU, or a CUDA device that PyTorch uses as well."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ort_accel.runtime import cuda
from ort_accel.runtime.import_ort import native as ort
from ort_accel.runtime.model_cache import processor

CPU_PROVIDER = "CPUExecutionProvider"

Provider = str | tuple[str, dict[str, str]]
"""An execution provider's name, or its name with its options."""


@dataclass(frozen=True)
class ExecutionDevice:
    """One device. Its text is part of a cached model's name, so it holds nothing that differs between processes."""

    kind: str = "cpu"
    """The device type in PyTorch: `cpu` or `cuda`."""
    index: int = 0
    options: tuple[tuple[str, str], ...] = ()
    """Options of the provider besides its device, stream and allocator."""
    torch_memory: bool = False
    """True if PyTorch's allocator provides the memory."""

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def device(self) -> torch.device:
        """The device as a torch.device."""
        return torch.device(self.kind, self.index) if self.is_cuda else torch.device("cpu")

    def hardware(self) -> str:
        """Returns the hardware's name, for which measurements hold."""
        return f"{self} {torch.cuda.get_device_name(self.index)}" if self.is_cuda else processor()

    def settle(self) -> None:
        """Wait until the device has finished all its work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.index)

    def ort_device(self) -> ort.OrtDevice:
        """Returns the device as an OrtDevice, on which results are allocated."""
        memory = ort.OrtDevice.default_memory()
        if not self.is_cuda:
            return ort.OrtDevice(ort.OrtDevice.cpu(), memory, 0)
        try:
            return ort.OrtDevice(ort.OrtDevice.cuda(), memory, cuda.NVIDIA_VENDOR_ID, self.index)
        except TypeError:  # before 1.22 a device had no vendor
            return ort.OrtDevice(ort.OrtDevice.cuda(), memory, self.index)

    def stream(self) -> torch.cuda.Stream | None:
        """Returns the stream for a session that is created now; None on the CPU."""
        return cuda.stream_for(self.index, self.torch_memory) if self.is_cuda else None

    def providers(self, stream: torch.cuda.Stream | None, *, refuse_cpu_nodes: bool) -> list[Provider]:
        """Returns the execution providers of a session with their options, the preferred one first.

        With `refuse_cpu_nodes` the CPU's provider is left out on a CUDA device.
        """
        if stream is None:
            return [CPU_PROVIDER]
        options = cuda.provider_options(self.index, stream, torch_memory=self.torch_memory) | dict(self.options)
        return [(cuda.PROVIDER, options), *([] if refuse_cpu_nodes else [CPU_PROVIDER])]

    def __str__(self) -> str:
        return f"CUDA device {self.index}" if self.is_cuda else "CPU"


CPU = ExecutionDevice()
