"""What sessions compute on: the processor, or a CUDA device that PyTorch computes on, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ort_accel.runtime import cuda
from ort_accel.runtime.import_ort import native as ort
from ort_accel.runtime.model_cache import processor

CPU_PROVIDER = "CPUExecutionProvider"


@dataclass(frozen=True)
class Place:
    """One device. Its text is part of what names a cached model, so it holds nothing that differs between processes."""

    kind: str = "cpu"
    """As PyTorch calls it: `cpu` or `cuda`."""
    index: int = 0
    options: tuple[tuple[str, str], ...] = ()
    """What the provider is told beside its device, its stream and whose memory it uses."""
    torch_memory: bool = False
    """Whether memory comes from PyTorch's allocator."""

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def device(self) -> torch.device:
        """The same for PyTorch."""
        return torch.device(self.kind, self.index) if self.is_cuda else torch.device("cpu")

    def hardware(self) -> str:
        """What is computed on, by name: measurements hold for it only."""
        return f"{self} {torch.cuda.get_device_name(self.index)}" if self.is_cuda else processor()

    def settle(self) -> None:
        """Wait until all work that was begun is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.index)

    def ort_device(self) -> Any:
        """The same for ONNX Runtime: where results of a run are to lie."""
        memory = ort.OrtDevice.default_memory()
        if not self.is_cuda:
            return ort.OrtDevice(ort.OrtDevice.cpu(), memory, 0)
        try:
            return ort.OrtDevice(ort.OrtDevice.cuda(), memory, cuda.NVIDIA, self.index)
        except TypeError:  # before 1.22 a device did not name who made it
            return ort.OrtDevice(ort.OrtDevice.cuda(), memory, self.index)

    def stream(self) -> torch.cuda.Stream | None:
        """The stream that a session computes on which is made now; None on the CPU."""
        return cuda.stream_for(self.index, self.torch_memory) if self.is_cuda else None

    def providers(self, stream: torch.cuda.Stream | None, *, whole: bool) -> list[Any]:
        """The execution providers of a session, the first choice first, with their options.

        With `whole`, no node is left to the CPU.
        """
        if stream is None:
            return [CPU_PROVIDER]
        options = cuda.provider_options(self.index, stream, torch_memory=self.torch_memory) | dict(self.options)
        return [(cuda.PROVIDER, options), *([] if whole else [CPU_PROVIDER])]

    def __str__(self) -> str:
        return f"CUDA device {self.index}" if self.is_cuda else "CPU"


CPU = Place()
