"""Compares the engine's training steps with eager PyTorch's during the training, and runs the faster of the two.

1. A small model begins in eager mode, and is compiled once its steps have taken as long as compiling would.
2. When the engine's steps compile nothing any more, engine and eager mode take turns until one is clearly faster.
3. The faster one goes on. A pair of steps is compared again from time to time, and sooner when the pace changes. The
   cost of the slower steps decides how often: it stays at one or two parts in a hundred of the whole time.
4. Generated kernels make the engine's steps faster, so the comparison begins anew with them. They are tried in steps of
   the engine: where eager mode was faster, in single ones, so seldom that these cost little.

Eager steps are steps of the training: they draw the same random numbers and give the same gradients up to rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ort_accel.config import Config
from ort_accel.eager.rerun import generator_of
from ort_accel.eager.step_clock import MOST_CALLS, DeviceMoment, HostMoment, Moment, Result, Step
from ort_accel.eager.turns import PAIRS_KEPT, Turns
from ort_accel.graph_cache.store import GRAPHS_LOADED
from ort_accel.memory.out_of_memory import is_out_of_memory
from ort_accel.memory.process_memory import available_bytes
from ort_accel.observe.logs import LOG, say
from ort_accel.reporting.report import Report
from ort_accel.reporting.timings import EAGER, ENGINE, KERNELS_READY, KERNELS_TRIED, StepComparison

FEATURE = "engine.compare_with_eager"

SMALL_FLOPS = 1e9
"""A model whose step takes fewer operations begins in eager mode."""
COMPILE_S, COMPILE_S_PER_LAYER = 1.0, 0.1
"""The time that compiling is assumed to take, in all and for each module with parameters of its own."""
SETTLED_STEPS = 3
"""Steps of the engine without a compilation, before it is compared."""
TRIAL_STEPS = 30
"""Steps of the engine after which the trial of generated kernels is not waited for any more."""
TRIAL_COST_SHARE = 0.02
"""Share of the time that the trial may cost where eager mode is faster."""
MEMORY_SHARE = 0.5
"""Share of the free memory that an eager step may be expected to take."""


class EagerComparison:
    """Decides for each training step of one model who runs it."""

    def __init__(self, config: Config, report: Report, device: torch.device, *, sees_steps: bool) -> None:
        """`sees_steps`: a call is one of the whole model."""
        self._report, self._device = report, device
        self.on_eager_step: Callable[[float], None] = lambda _: None
        """Called with the seconds of each step in eager mode."""
        self._now: Callable[[], Moment] = DeviceMoment if device.type == "cuda" else HostMoment
        self._why_not = why_not(config, sees_steps)
        self._follows_pytorch = config.engine.deterministic == "auto"
        self._start = SmallStart()
        self._turns = Turns()
        self._captured_bytes, self._eager_bytes = 0, 0
        self._step: Step | None = None
        self._is_in_eager = False
        self._under_way: list[tuple[Step, bool]] = []
        """Steps whose times are not known yet; with True for those in eager mode."""
        self._steps, self._compilations, self._kernels, self._since_compilation = 0, 0, 0, 0
        self._trial_steps, self._eager_steps_between = 0, 0
        """Steps of the engine for the trial of kernels where eager mode is faster, and steps of eager mode since."""
        self._eager_seconds: deque[float] = deque(maxlen=PAIRS_KEPT)
        report.off(FEATURE, self._why_not or "no step has been compared yet")

    @property
    def waits_in_eager(self) -> bool:
        """True while a small model trains in eager mode and is not compiled yet."""
        return not self._why_not and self._steps > 0 and self._start.is_on

    def captured(self, module: torch.fx.GraphModule) -> None:
        """Add the bytes of a captured graph's results: eager mode may hold all of them."""
        if not self._why_not and torch.is_grad_enabled():
            self._captured_bytes += _bytes_of_results(module)

    def call(
        self, model: nn.Module, inputs: Sequence[object], engine: Callable[[], Result], eager: Callable[[], Result]
    ) -> Result:
        """Make a training call on the engine or in eager mode."""
        if self._why_not or (self._follows_pytorch and torch.are_deterministic_algorithms_enabled()):
            return engine()
        step = self._step
        if step is None or step.is_over or step.was_abandoned:
            step = self._step = self._begin(model, inputs)
        if step.calls >= MOST_CALLS:
            self._give_up("no backward follows the model's calls")
            return engine()
        if self._is_in_eager:
            return self._in_eager(step, inputs, engine, eager)
        result = step.call(engine, inputs)
        self._note_compilations(step)
        return result

    def _in_eager(
        self, step: Step, inputs: Sequence[object], engine: Callable[[], Result], eager: Callable[[], Result]
    ) -> Result:
        """Make a call in eager mode; if memory does not suffice, make it on the engine, and compare no more."""
        generator = generator_of(self._device)
        random = generator.get_state()
        try:
            return step.call(eager, inputs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        generator.set_state(random)
        self._give_up("memory does not suffice for a step of eager mode")
        return engine()

    def _begin(self, model: nn.Module, inputs: Sequence[object]) -> Step:
        """Begin a step, and decide who runs it."""
        self._take_times()
        self._steps += 1
        if self._steps == 1 and self._start.begin(model, inputs):
            self._report.off(FEATURE, self._start.describe())
            say(self._start.describe())
        self._note_kernels()
        self._is_in_eager = self._start.is_on or self._is_eager_turn()
        return Step(self._now, self._ended)

    def _is_eager_turn(self) -> bool:
        """True if eager mode runs the next step; the first comparison waits until the engine compiles no more."""
        if self._tries_kernels_beside_eager:
            return not self._is_trial_turn()
        wait = TRIAL_STEPS if self._tries_kernels else SETTLED_STEPS
        if not self._turns.is_decided and self._since_compilation < wait:
            return False
        if self._turns.is_due and (reason := self._no_room()):
            self._give_up(reason)
            return False
        return self._turns.next_is_eager()

    def _note_kernels(self) -> None:
        """Compare anew where generated kernels have come, or were tried."""
        kernels = self._report.counters[KERNELS_READY] + self._report.counters[KERNELS_TRIED]
        if kernels != self._kernels and not self._tries_kernels_beside_eager:
            self._kernels, self._since_compilation = kernels, 0
            if not self._tries_kernels:
                self._trial_steps = 0
            self._turns.begin_anew()

    @property
    def _tries_kernels(self) -> bool:
        """True while segments run with and without generated kernels in turn."""
        return self._report.counters[KERNELS_READY] > self._report.counters[KERNELS_TRIED]

    @property
    def _tries_kernels_beside_eager(self) -> bool:
        """True while this happens and eager mode, which is faster, runs the steps."""
        return self._tries_kernels and self._turns.is_eager_settled and self._trial_steps < TRIAL_STEPS

    def _is_trial_turn(self) -> bool:
        """True if the engine runs the next step to try kernels."""
        self._eager_steps_between += 1
        if self._eager_steps_between * TRIAL_COST_SHARE <= self._turns.ratio - 1:
            return False
        self._trial_steps, self._eager_steps_between = self._trial_steps + 1, 0
        return True

    def _no_room(self) -> str:
        """Return why memory might not suffice for a step of eager mode; empty if it will."""
        needed, free = self._eager_bytes, _free_bytes(self._device)
        if free is None or needed <= MEMORY_SHARE * free:
            return ""
        return f"a step of eager mode may need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"

    def _note_compilations(self, step: Step) -> None:
        counters = self._report.counters
        compilations = counters["compilations"] + counters[GRAPHS_LOADED]
        if compilations != self._compilations:
            self._compilations, self._since_compilation = compilations, 0
            self._eager_bytes = max(self._eager_bytes, self._captured_bytes)
            step.is_typical = False
        self._captured_bytes = 0

    def _ended(self, step: Step) -> None:
        self._note_compilations(step)  # of the backward
        self._since_compilation += not self._is_in_eager
        self._under_way.append((step, self._is_in_eager))
        self._take_times()

    def _take_times(self) -> None:
        """Evaluate the steps that the device has ended."""
        while self._under_way:
            step, in_eager = self._under_way[0]
            if (seconds := step.seconds()) is None:
                return
            del self._under_way[0]
            if in_eager:
                self.on_eager_step(seconds)
            if self._start.is_on:
                self._start.took(seconds)
                self._report.counters["steps of a small model in eager mode"] += 1
            elif step.is_typical:
                self._eager_seconds.extend([seconds] * in_eager)
                if self._turns.took(seconds / max(1, step.elements), in_eager):
                    self._decided()

    def _decided(self) -> None:
        """Report who runs the next steps; log it if that has changed."""
        before = self._report.comparison
        in_eager, ratio = self._turns.prefers_eager, self._turns.ratio
        runner = EAGER if in_eager else ENGINE
        seconds = median(self._eager_seconds)
        self._report.comparison = found = StepComparison(runner, ratio, self._turns.pairs, self._steps, seconds)
        self._report.applied(FEATURE, str(found))
        if before is None or before.runner != runner:
            say(str(found))

    def _give_up(self, reason: str) -> None:
        """Compare no more: the engine runs all steps from here on."""
        self._why_not = reason
        self._report.off(FEATURE, reason)
        LOG.info("steps are not compared with eager PyTorch: %s", reason)


class SmallStart:
    """A small model's first steps in eager mode: compiling it would take longer than many of its steps."""

    def __init__(self) -> None:
        self.is_on = False
        self._compile_s, self._spent_s = 0.0, 0.0

    def begin(self, model: nn.Module, inputs: Sequence[object]) -> bool:
        """Estimate the operations of a step from parameters and first batch; True if it begins in eager mode."""
        flops_per_element = 6 * sum(each.numel() for each in model.parameters() if not is_lazy(each))
        elements = max((item.numel() for item in inputs if isinstance(item, torch.Tensor)), default=0)
        layers = sum(1 for module in model.modules() if any(True for _ in module.parameters(recurse=False)))
        self._compile_s = COMPILE_S + COMPILE_S_PER_LAYER * layers
        self.is_on = 0 < flops_per_element * elements < SMALL_FLOPS
        return self.is_on

    def took(self, seconds: float) -> None:
        """Add a step in eager mode, and end once these have taken as long as compiling would."""
        self._spent_s += seconds
        self.is_on = self._spent_s < self._compile_s

    def describe(self) -> str:
        """Say what is done with the model."""
        return (
            "this model is small and trains in eager PyTorch first; it is compiled once its steps have taken "
            f"{self._compile_s:.0f} s, about as long as compiling it takes"
        )


def why_not(config: Config, sees_steps: bool) -> str:
    """Return why steps are not compared; empty if they are."""
    engine, compute, density, memory = config.engine, config.compute, config.density, config.memory
    deterministic = engine.deterministic is True or (
        engine.deterministic == "auto" and torch.are_deterministic_algorithms_enabled()
    )
    reasons = {
        "switched off": engine.compare_with_eager is False,
        "the engine does not see whole steps of the model": not sees_steps,
        "engine.fallback is error": engine.fallback == "error",
        "compute.placement says who runs what": compute.placement != "auto",
        "steps must give the same bits": deterministic,
        "compute.tuning measures within the engine": compute.tuning.enabled,
        "the configuration asks for what only the engine does": (
            True in (density.labels, density.padding, compute.loss_only) or engine.save_onnx is not None
        ),
        "memory is held down, and eager mode might not hold a step": memory.saves or memory.offload,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a device; None if they are unknown."""
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _bytes_of_results(module: torch.fx.GraphModule) -> int:
    """Return the bytes of all results of a captured graph, at the sizes that it is captured with."""
    storages: dict[int, int] = {}
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if node.op in ("placeholder", "output") or not isinstance(value, torch.Tensor):
            continue
        storage = value.untyped_storage()
        storages[storage._cdata] = _hint(storage.nbytes())
    return sum(storages.values())


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else int(size)
