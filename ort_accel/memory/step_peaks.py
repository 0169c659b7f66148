"""`observe.memory_stats`: memory at four points of a training step, and the peak of one step as it was measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from ort_accel.memory.malloc_settings import return_free_memory
from ort_accel.memory.process_memory import MostInUse, in_use, reset_peak, resident
from ort_accel.memory_records import MeasuredPeak
from ort_accel.observe.logs import rank
from ort_accel.reporting import Report

FIRST = 2
"""The step before which what is only kept for later is given back; those before it capture and compile. It fills the
pools again, and the next one is measured."""

EACH = 10
"""So many steps are logged one by one; later ones where their number is a power of two."""


@dataclass(frozen=True)
class _Base:
    """What a process holds before pools fill, in bytes, and how much was compiled until then."""

    resident: int
    in_use: int | None
    compiled: int


class MemoryWatch:
    """Follows the training steps of one model."""

    def __init__(
        self, report: Report, release: Callable[[], None], prints: bool, behind: Sequence[Callable[[], None]] = ()
    ) -> None:
        """`release` empties the pool of ONNX Runtime, `prints` asks for the line of each phase; `behind` are called, in
        this order, behind each forward and each backward."""
        self._report, self._release, self._prints, self._behind = report, release, prints, behind
        self._step = -1
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._base: _Base | None = None
        self._held = 0
        self._sampled: MostInUse | None = None
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()
        if self._sampled is not None:
            self._sampled.end()

    def before_forward(self, model: nn.Module) -> None:
        """A forward with gradients begins."""
        self._end_measurement()
        self._model, self._step = ref(model), self._step + 1
        is_due = self._step >= FIRST and self._report.measured_peak is None
        if is_due and _device(model).type == "cpu":
            if self._base is None or self._base.compiled != self._report.counters["compilations"]:
                self._base = self._emptied()
            else:
                self._begin_measurement(model)
        self._line("before forward")

    def after_forward(self, outputs: Any) -> None:
        """It has given its outputs; from one of them the backward will come."""
        self._call_behind()
        self._line("after forward")
        leaves = (leaf for leaf in pytree.tree_leaves(outputs) if type(leaf) is Tensor and leaf.requires_grad)
        first = next(leaves, None)
        if first is not None:
            step = self._step
            queue = Variable._execution_engine.queue_callback
            first.register_hook(lambda _: queue(lambda: self._backwarded(step)))  # type: ignore[no-untyped-call]

    def _backwarded(self, step: int) -> None:
        self._call_behind()
        if step == self._step:
            self._line("after backward")

    def _call_behind(self) -> None:
        for call in self._behind:
            call()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = self._model()
        if model is None:
            return
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(item) in own for group in optimizer.param_groups for item in group["params"]):
            self._optimizer = ref(optimizer)
            if self._sampled is not None:
                self._sampled.end()
            self._line("after step")

    def _emptied(self) -> _Base | None:
        """What is there with nothing in it that is only kept for later; None where the system does not tell."""
        self._release()
        return_free_memory()
        base = resident()
        return None if base is None else _Base(base, in_use(), self._report.counters["compilations"])

    def _begin_measurement(self, model: nn.Module) -> None:
        if reset_peak():
            self._held = sum(tensor.nbytes for tensor in self._tensors(model))
            self._sampled = MostInUse()

    def _end_measurement(self) -> None:
        """The step that was measured is over. One in which something was compiled does not count."""
        sampled, self._sampled = self._sampled, None
        if sampled is None or self._base is None:
            return
        base, self._base = self._base, None
        used, most = sampled.end(), resident("VmHWM")
        if most is not None and self._report.counters["compilations"] == base.compiled:
            used = None if used is None or base.in_use is None else used - base.in_use
            self._report.measured_peak = MeasuredPeak(self._step, self._held, most - base.resident, used)

    def _tensors(self, model: nn.Module) -> Iterator[Tensor]:
        """What is alive before the step: parameters, buffers, gradients that are kept, and the optimizer's states."""
        parameters = list(model.parameters())
        yield from parameters
        yield from model.buffers()
        yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
        optimizer = self._optimizer()
        states = optimizer.state.values() if optimizer is not None else ()
        yield from (value for state in states for value in state.values() if isinstance(value, Tensor))

    def _line(self, phase: str) -> None:
        model, step = self._model(), self._step
        if not self._prints or model is None or not (step < EACH or step & (step - 1) == 0):
            return
        figures = {**_figures(_device(model)), **_sizes(model)}
        shown = " | ".join(f"{name} {'unknown' if value is None else value >> 20}" for name, value in figures.items())
        print(f"rank-{rank()} step {step} memory (MiB) | {phase} | {shown}", file=sys.stderr)


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _figures(device: torch.device) -> dict[str, int | None]:
    """What the device's allocator tells; on a CPU, what the system tells of the process."""
    if device.type != "cuda":
        return {"in use": in_use(), "resident": resident(), "most resident": resident("VmHWM")}
    told = torch.cuda.memory_stats(device)
    names = {"allocated": "allocated_bytes", "cached": "reserved_bytes", "inactive": "inactive_split_bytes"}
    found: dict[str, int | None] = {}
    for name, key in names.items():
        found |= {name: told.get(f"{key}.all.current"), f"max {name}": told.get(f"{key}.all.peak")}
    return found


def _sizes(model: nn.Module) -> dict[str, int]:
    """Bytes of a model's own tensors."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    kinds = {"parameters": model.parameters(), "gradients": gradients, "buffers": model.buffers()}
    return {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in kinds.items()}
