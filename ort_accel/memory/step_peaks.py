"""`observe.memory_stats`: memory at four phases of a training step, and the measured peak of one step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from ort_accel.memory.malloc_settings import trim_heap
from ort_accel.memory.optimizer_states import optimizer_of, state_bytes
from ort_accel.memory.process_memory import AllocationSampler, in_use, reset_high_water_mark, resident
from ort_accel.observe.logs import rank
from ort_accel.reporting.memory import MeasuredPeak
from ort_accel.reporting.report import Report

FIRST_WITHOUT_COMPILING = 2
"""Before this step, the heap is trimmed. The step fills it again, and the next one is measured."""

STEPS_LOGGED = 10
"""The first steps are logged; later ones if their number is a power of two."""


ADAM_STATES = 2
"""The states a parameter where the optimizer is not known: Adam's two moments."""


@dataclass(frozen=True)
class _Baseline:
    """Memory of the process with a trimmed heap, and the number of compilations until then."""

    resident_bytes: int
    allocated_bytes: int | None
    compilations: int


class StepMemoryWatch:
    """Follows the training steps of one model."""

    def __init__(self, report: Report, prints: bool, after_pass: Callable[[], None] | None = None) -> None:
        """`prints` asks for a line for each phase. `after_pass` is called after each forward and each backward."""
        self._report, self._prints, self._after_pass = report, prints, after_pass or (lambda: None)
        self._step = -1
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._baseline: _Baseline | None = None
        self._persistent_bytes = 0
        self._sampler: AllocationSampler | None = None
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._states: tuple[int, int] | None = None
        """The bytes of the trained parameters, and of the states that the optimizer keeps for them."""
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def close(self) -> None:
        """Stop measuring and printing."""
        self._hook.remove()
        if self._sampler is not None:
            self._sampler.end()

    def before_forward(self, model: nn.Module) -> None:
        """Note that a forward with gradients begins."""
        self._end_measurement()
        self._model, self._step, self._states = ref(model), self._step + 1, None
        is_due = self._step >= FIRST_WITHOUT_COMPILING and self._report.measured_peak is None
        if is_due and _device(model).type == "cpu":
            if self._baseline is None or self._baseline.compilations != self._report.counters["compilations"]:
                self._baseline = self._trimmed_baseline()
            else:
                self._begin_measurement(model)
        self._print_line("before forward")

    def after_forward(self, outputs: Any) -> None:
        """Note that the forward has ended. A hook on an output notes the end of the backward."""
        self._after_pass()
        self._print_line("after forward")
        leaves = (leaf for leaf in pytree.tree_leaves(outputs) if type(leaf) is Tensor and leaf.requires_grad)
        first = next(leaves, None)
        if first is not None:
            step = self._step
            queue = Variable._execution_engine.queue_callback
            first.register_hook(lambda _: queue(lambda: self._after_backward(step)))  # type: ignore[no-untyped-call]

    def state_bytes(self, trained: int) -> int:
        """Returns the bytes of optimizer states for trained parameters of so many bytes of the present step's model."""
        if self._states is None:
            self._states = self._find_states()
        parameters, states = self._states
        return states * trained // parameters

    def _find_states(self) -> tuple[int, int]:
        model = self._model()
        trained = [] if model is None else [item for item in model.parameters() if item.requires_grad]
        optimizer = self._optimizer() or optimizer_of(trained)
        states = None if optimizer is None else state_bytes(optimizer, trained)
        parameters = sum(item.nbytes for item in trained)
        if states is None or not parameters:
            whose = (
                "no optimizer of this model exists yet"
                if optimizer is None
                else f"a {type(optimizer).__name__} does not tell"
            )
            self._report.note(f"optimizer states: two a parameter are assumed, as Adam keeps; {whose}")
            return 1, ADAM_STATES
        self._report.note(
            f"optimizer states: {states / 2**20:,.1f} MiB for {parameters / 2**20:,.1f} MiB of trained parameters"
        )
        return parameters, states

    def _after_backward(self, step: int) -> None:
        self._after_pass()
        if step == self._step:
            self._print_line("after backward")

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = self._model()
        if model is None:
            return
        trained = {id(parameter) for parameter in model.parameters()}
        if any(id(item) in trained for group in optimizer.param_groups for item in group["params"]):
            self._optimizer = ref(optimizer)
            if self._sampler is not None:
                self._sampler.end()
            self._print_line("after step")

    def _trimmed_baseline(self) -> _Baseline | None:
        """Trim the heap, and return the memory that is left; None if the system has no answer."""
        trim_heap()
        baseline = resident()
        return None if baseline is None else _Baseline(baseline, in_use(), self._report.counters["compilations"])

    def _begin_measurement(self, model: nn.Module) -> None:
        if reset_high_water_mark():
            self._persistent_bytes = sum(tensor.nbytes for tensor in self._tensors(model))
            self._sampler = AllocationSampler()

    def _end_measurement(self) -> None:
        """Record the measured step, unless it has compiled something."""
        sampler, self._sampler = self._sampler, None
        if sampler is None or self._baseline is None:
            return
        baseline, self._baseline = self._baseline, None
        allocated, resident_peak = sampler.end(), resident("VmHWM")
        if resident_peak is None or self._report.counters["compilations"] != baseline.compilations:
            return
        before = baseline.allocated_bytes
        added = None if allocated is None or before is None else allocated - before
        growth = resident_peak - baseline.resident_bytes
        self._report.measured_peak = MeasuredPeak(self._step, self._persistent_bytes, growth, added)

    def _tensors(self, model: nn.Module) -> Iterator[Tensor]:
        """Yields the tensors that exist before a step: parameters, buffers, gradients and optimizer states."""
        parameters = list(model.parameters())
        yield from parameters
        yield from model.buffers()
        yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
        optimizer = self._optimizer()
        states = optimizer.state.values() if optimizer is not None else ()
        yield from (value for state in states for value in state.values() if isinstance(value, Tensor))

    def _print_line(self, phase: str) -> None:
        model, step = self._model(), self._step
        if not self._prints or model is None or not (step < STEPS_LOGGED or step & (step - 1) == 0):
            return
        figures = {**_figures(_device(model)), **_sizes(model)}
        shown = " | ".join(f"{name} {'unknown' if value is None else value >> 20}" for name, value in figures.items())
        print(f"rank-{rank()} step {step} memory (MiB) | {phase} | {shown}", file=sys.stderr)


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _figures(device: torch.device) -> dict[str, int | None]:
    """Returns the figures of the device's allocator; on a CPU, those of the process."""
    if device.type != "cuda":
        return {"in use": in_use(), "resident": resident(), "most resident": resident("VmHWM")}
    stats = torch.cuda.memory_stats(device)
    names = {"allocated": "allocated_bytes", "cached": "reserved_bytes", "inactive": "inactive_split_bytes"}
    found: dict[str, int | None] = {}
    for name, key in names.items():
        found |= {name: stats.get(f"{key}.all.current"), f"max {name}": stats.get(f"{key}.all.peak")}
    return found


def _sizes(model: nn.Module) -> dict[str, int]:
    """Returns the bytes of a model's parameters, gradients and buffers."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    kinds = {"parameters": model.parameters(), "gradients": gradients, "buffers": model.buffers()}
    return {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in kinds.items()}
