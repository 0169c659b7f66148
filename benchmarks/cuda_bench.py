"""A device for `benchmarks/on_cuda.py`: sizes that suit it, its steps, and what was found out about it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import ort_accel
from ort_accel.cli.benchmark.contenders import Trace
from ort_accel.cli.benchmark.workload import Batch, Workload, batch_of, build

FP32, HALF = 1e-4, 3.0
"""How far a gradient may be from eager's, as a share of its length; in 16 bits, how many times eager's own distance."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Options = Mapping[str, Any]


@dataclass
class Finding:
    """One thing that was looked at."""

    name: str
    is_right: bool
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Bench:
    """A device, and sizes that suit it."""

    device: torch.device
    tiny: bool
    rounds: int = 10
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)
    """Single figures that the checks measured."""
    times: list[dict[str, Any]] = field(default_factory=list)
    """Steps that were timed beside eager and Inductor."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def workload(self, model: str, **sizes: Any) -> Workload:
        """A model of the size that is measured."""
        small = {"hidden": 32, "layers": 2, "heads": 2, "batch": 2, "length": 12, "vocab": 100}
        large = {"hidden": 768, "layers": 12, "heads": 12, "batch": 16, "length": 256, "vocab": 30522}
        return Workload(model=model, **({**(small if self.tiny else large), **sizes}))

    def model(self, workload: Workload) -> tuple[nn.Module, Batch]:
        """The model of a workload and its batch, on the device."""
        batch = {name: item.to(self.device) for name, item in batch_of(workload).items()}
        return build(workload).to(self.device), batch

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """Autocast to a type of 16 bits; nothing for `fp32`."""
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[precision])

    def step(self, model: nn.Module, batch: Batch, precision: str = "fp32") -> Trace:
        """One step from a fixed seed, with its loss and gradients."""
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        with self.autocast(precision):
            loss = model(**batch).loss
        loss.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        return Trace(float(loss.detach()), {name: grad.clone() for name, grad in found.items() if grad is not None})

    def settle(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def looked(self, name: str, look: Callable[[], str]) -> None:
        """Run one check and note the fault it returns or raises; an empty text is no fault."""
        begin = time.perf_counter()
        try:
            fault = look()
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error)[:1000]}"
        self.findings.append(Finding(name, not fault, fault, round(time.perf_counter() - begin, 2)))


def accelerated(model: nn.Module, **options: Options) -> nn.Module:
    """A copy of a model whose every step runs on the engine."""
    engine = {"compare_with_eager": False, **options.pop("engine", {})}
    config = {"version": 1, "observe": {"log_level": "error"}, "engine": engine, **options}
    return ort_accel.accelerate(copy.deepcopy(model), config)


def peak_of_steps(bench: Bench, model: nn.Module, batch: Batch) -> tuple[tuple[Trace, Trace], int]:
    """Two steps, and the most bytes of the device that the second one takes."""
    one = bench.step(model, batch)
    if not bench.is_cuda:
        return (one, bench.step(model, batch)), 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    other = bench.step(model, batch)
    return (one, other), torch.cuda.max_memory_allocated() - before
