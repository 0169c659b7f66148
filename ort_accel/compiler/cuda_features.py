"""What the report says of the keys that are about CUDA devices."""

from __future__ import annotations

from ort_accel.compiler.device_placement import against_sharing
from ort_accel.config import Config
from ort_accel.reporting import Report
from ort_accel.runtime.device import Place

ON_CPU = "for CUDA devices; the model is on the CPU"

NO_TRITON = (
    "ort_accel generates no Triton kernels: ONNX Runtime's own kernels run, PyTorch's where it has none, and "
    "compute.fusions joins operators"
)


def record_cuda(config: Config, place: Place, report: Report) -> None:
    """Write down provider options, convolution, whose memory, and Triton."""
    given = config.engine.provider_options
    if given:
        report.applied("engine.provider_options", ", ".join(f"{name} {value}" for name, value in given.items()))
    else:
        report.off("engine.provider_options", "not asked for")
    if place.is_cuda:
        report.applied("compute.conv_algorithm", f"cuDNN searches for kernels: {config.compute.conv_algorithm}")
    else:
        report.off("compute.conv_algorithm", ON_CPU)
    _record_allocator(config, place, report)
    wish = config.compute.triton.enabled
    report.off("compute.triton.enabled", "switched off" if wish is False else NO_TRITON if place.is_cuda else ON_CPU)


def _record_allocator(config: Config, place: Place, report: Report) -> None:
    path = "memory.external_allocator"
    if place.torch_memory:
        report.applied(path, "ONNX Runtime takes its memory from PyTorch's allocator")
    elif not place.is_cuda:
        report.off(path, ON_CPU)
    elif config.memory.external_allocator is False:
        report.off(path, "switched off")
    else:
        report.refused(path, against_sharing(place))
