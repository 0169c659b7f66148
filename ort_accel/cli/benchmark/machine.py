"""Facts about the machine, and the highest speed of its matrix products."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NotRequired, TypedDict

import torch

from ort_accel.runtime.dlpack import to_ort
from ort_accel.runtime.installed_ort import installed_runtime
from ort_accel.runtime.kernel_probes import Probe, Sample
from ort_accel.runtime.session import Session, SessionSettings

MATRIX_SIDE = 1024
MEASURING_SECONDS = 0.5


class Facts(TypedDict):
    """Processor, cores, load and versions."""

    cpu: str
    cpu_family: str
    cpu_model: str
    cores: int | None
    usable_cores: int | None
    threads: int
    load_before: list[float]
    load_after: NotRequired[list[float]]
    matmul_gflops: NotRequired[dict[str, float]]
    python: str
    torch: str
    onnxruntime: str


def facts(threads: int) -> Facts:
    """Returns processor, cores, load and versions."""
    runtime = installed_runtime()
    processor = _processor()
    return {
        "cpu": processor.get("model name") or platform.processor() or platform.machine(),
        "cpu_family": processor.get("cpu family", ""),
        "cpu_model": processor.get("model", ""),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "load_before": load(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "onnxruntime": f"{runtime.distribution} {runtime.version}",
    }


def in_short(facts: Facts) -> str:
    """Returns the processor, its threads, and the libraries, in a line."""
    return f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, {facts['onnxruntime']}"


def matmul_gflops(threads: int, precision: str) -> dict[str, float]:
    """Returns the speed of matrix products in torch and in ONNX Runtime; in bfloat16, too, for steps with autocast."""
    found = {"torch": _torch_gflops(torch.float32), "onnxruntime": _ort_gflops(threads)}
    if precision == "bf16":
        found["torch in bfloat16"] = _torch_gflops(torch.bfloat16)
    return {name: round(speed, 1) for name, speed in found.items()}


def load() -> list[float]:
    """Returns the load of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []


def _processor() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _torch_gflops(dtype: torch.dtype) -> float:
    left, right, result = (torch.randn(MATRIX_SIDE, MATRIX_SIDE).to(dtype) for _ in range(3))
    return _gflops(lambda: torch.mm(left, right, out=result))


def _ort_gflops(threads: int) -> float:
    product = Probe("MatMul", (Sample((MATRIX_SIDE, MATRIX_SIDE)),) * 2, {}, ("float32",), "", 17)
    session = Session(product.model().SerializeToString(), ["in0", "in1"], ["out0"], SessionSettings(threads))
    left, right = torch.randn(MATRIX_SIDE, MATRIX_SIDE), torch.randn(MATRIX_SIDE, MATRIX_SIDE)
    return _gflops(lambda: session([to_ort(left), to_ort(right)]))


def _gflops(product: Callable[[], object]) -> float:
    """Returns the speed of the fastest product within `MEASURING_SECONDS`: others may have been disturbed."""
    best = float("inf")
    end = time.perf_counter() + MEASURING_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return 2 * MATRIX_SIDE**3 / best / 1e9
