"""The Dynamo backend: the steps from a captured graph to a compiled one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import fx
from torch._guards import TracingContext

from ort_accel.capture.dynamic_shapes import ForeseenSizes
from ort_accel.capture.dynamo import DYNAMO_ERRORS
from ort_accel.capture.dynamo_failures import is_behind_graph_break
from ort_accel.capture.extra_guards import add_extra_guards, original_functions
from ort_accel.capture.forward_graph import checkpointed_parts, ends_at_graph_break
from ort_accel.capture.quantized_layers import capture_quantized_layers
from ort_accel.capture.sdpa_backend import attention_backend
from ort_accel.capture.traced_shapes import note_shapes
from ort_accel.compiler.autograd_graphs import AutogradCompiler, CompiledGraph, twice_differentiable
from ort_accel.compiler.cached_graphs import cached_graphs, can_cache
from ort_accel.compiler.compile_graph import predict_segments
from ort_accel.compiler.features import record_features, record_settings
from ort_accel.compiler.lowering import lowering_for
from ort_accel.compiler.refusals import is_on_meta, refuse_forbidden, refuse_moved
from ort_accel.compiler.row_dispatch import RowSkippingPolicy
from ort_accel.compiler.settings import Settings, resolve
from ort_accel.compiler.skip_rows import RowSkippingCompiler
from ort_accel.compiler.step_watchers import CompilerMemory, density_inspector, memory_watch, report_file
from ort_accel.config import Config, load_config
from ort_accel.eager.comparison import EagerComparison
from ort_accel.eager.evaluation import Evaluation
from ort_accel.eager.fallback import FallbackPolicy
from ort_accel.eager.held_outputs import HeldOutputs
from ort_accel.eager.run_eager import eager_function
from ort_accel.errors import OrtAccelError
from ort_accel.observe.logs import configure
from ort_accel.observe.progress import Progress
from ort_accel.passes.pipeline import Stage, run_passes
from ort_accel.recompute.planner import MemoryPlanner
from ort_accel.reporting.report import Report
from ort_accel.runtime.device import CPU
from ort_accel.runtime.host_memory import host_memory

FIXED_SIZES = (
    "torch.compile was called with dynamic=False: each new size is compiled anew, and after 8 of them PyTorch runs the "
    "model; `accelerate launch` does so unless --dynamo_use_dynamic is given"
)


class Backend:
    """Compiles the graphs of one model. Dynamo calls it once for each graph and set of shapes."""

    def __init__(self, settings: Settings, report: Report) -> None:
        config, level = settings.config, settings.config.observe.log_level
        self.settings, self.report = settings, report
        record_features(settings, report)
        configure(level)
        capture_quantized_layers()
        self.progress = Progress(report, level)
        self.policy = FallbackPolicy(config, report)
        self.compiler_memory = CompilerMemory(settings)
        self.lowering = lowering_for(settings, report, self.policy.failed, self.compiler_memory.trim)
        self.skipping = RowSkippingPolicy(config, report, settings.sees_steps)
        self.evaluation = _evaluation(settings, report)
        self.comparison = self._comparison()
        self.foreseen = ForeseenSizes()
        self.cached = cached_graphs(settings, self.skipping, report, self._objects)
        self.compiler = AutogradCompiler(
            settings, self.lowering, self._recompute(), self.policy.check, keeps_records=can_cache(settings)
        )
        self._held_outputs = HeldOutputs() if config.compute.loss_only == "auto" else None
        self._rows = RowSkippingCompiler(self.skipping, self.compiler.compile, self._held_outputs)
        self.memory_watch = memory_watch(settings, report, self.lowering)
        self.report_file = report_file(settings, report)
        self.inspector = density_inspector(settings, report)
        if self.memory_watch is not None:
            finalize(self, self.memory_watch.close)
        if self.report_file is not None:
            finalize(self, self.report_file.write_if_due)

    def _comparison(self) -> EagerComparison:
        settings, generator = self.settings, self.lowering.generator
        found = EagerComparison(self.config, self.report, settings.place.device, sees_steps=settings.sees_steps)
        if generator is not None:
            found.on_eager_step = generator.trained
        return found

    @property
    def config(self) -> Config:
        """Returns the configuration of the model."""
        return self.settings.config

    def __call__(self, module: fx.GraphModule, inputs: Sequence[object], **_: object) -> CompiledGraph:
        refuse_forbidden(module, self.config.engine)
        refuse_moved(inputs, self.settings.place)
        if is_on_meta(inputs):
            return eager_function(module)
        note_shapes()
        self.comparison.captured(module)
        add_extra_guards(module.graph)
        self._follow_pytorch()
        for part in (module, *checkpointed_parts(module)):
            run_passes(part.graph, Stage.CAPTURED, self.lowering.passes, self.report)
        self.skipping.graph_breaks |= ends_at_graph_break(module) or is_behind_graph_break()
        segments = len(self.report.segments)
        try:
            attention, captured = attention_backend(self.config.compute.attention), original_functions(module.graph)
            with self.report.timed("capture"), attention, captured:
                return self._cached_or_compiled(module, inputs)
        except (OrtAccelError, *DYNAMO_ERRORS):
            raise
        except KeyboardInterrupt:  # the next call compiles anew
            del self.report.segments[segments:]
            raise
        except Exception as error:  # AOTAutograd or a pass failed on the graph
            del self.report.segments[segments:]
            self.policy.not_compiled("a graph", error)
            return eager_function(module)

    def _cached_or_compiled(self, module: fx.GraphModule, inputs: Sequence[object]) -> CompiledGraph:
        if self.cached is None or TracingContext.try_get() is None:
            return self._compile(module, inputs)
        name = self.cached.name(module, inputs, self._context())
        if name is None:
            return self._compile(module, inputs)
        if (kept := self.cached.get(name, module, inputs)) is not None:
            self.compiler.graphs += kept.graphs
            self.evaluation.compiled_a_step(kept.seconds)
            self.compiler_memory.trim()
            return kept.run
        return self.cached.make(name, module, partial(self._compile_counted, module, inputs))

    def _context(self) -> Sequence[object]:
        """Returns what a compiled graph depends on beside the captured graph and its inputs."""
        skipping = self.skipping
        breaks, lazy, learns = skipping.graph_breaks, skipping.leaves_outputs_unread, skipping.learns_of_reads
        settings = self.config.to_yaml(), self.settings.runtime, self.settings.opset
        has_budget = self.config.memory.budget is not None and self.memory_watch is not None
        states = self._state_bytes(1 << 30) if has_budget else 0  # of the optimizer, in a predicted peak
        return *settings, states, self.compiler.graphs, lazy, breaks, learns

    def _objects(self) -> dict[str, object]:
        """Returns the objects of this process that a kept graph refers to, by name."""
        objects: dict[str, object] = {
            "report": self.report,
            "policy": self.policy,
            "skipping": self.skipping,
            "compiler memory": self.compiler_memory,
            "sessions": self.lowering.sessions,
            "generator": self.lowering.generator,
            "copies": self.lowering.copies,
            "leaves": self.lowering.leaves,
            "kept outputs": self._held_outputs,
            "before each segment": self.lowering.before_segments,
        }
        return {name: item for name, item in objects.items() if item is not None}

    def _compile_counted(self, module: fx.GraphModule, inputs: Sequence[object]) -> tuple[CompiledGraph, int]:
        before = self.compiler.graphs
        return self._compile(module, inputs), self.compiler.graphs - before

    def _compile(self, module: fx.GraphModule, inputs: Sequence[object]) -> CompiledGraph:
        may_leave_out = self.skipping.wants_any or self.skipping.leaves_outputs_unread
        if may_leave_out and TracingContext.try_get() is not None:  # Dynamo knows the symbols of sizes
            return self._rows.compile(module, inputs)
        return twice_differentiable(self.compiler.compile(module, inputs), module, self.report)

    def _recompute(self) -> MemoryPlanner:
        config, lowering = self.config, self.lowering
        steps_early = lowering.leaves is not None and config.optimizer.step_in_backward
        cutter = partial(predict_segments, lowering=lowering)
        predicts = config.observe.memory_stats
        return MemoryPlanner(config.memory, self.report, cutter, self._state_bytes, steps_early, predicts)

    def _state_bytes(self, trained: int) -> int:
        assert self.memory_watch is not None, "a step's memory is predicted where it is followed"
        return self.memory_watch.state_bytes(trained)

    def _follow_pytorch(self) -> None:
        """Compile by PyTorch's present settings if they have changed; Dynamo captures anew then."""
        settings = self.settings.follow_pytorch()
        if settings is not self.settings:
            self.settings = settings
            self.lowering.follow(settings)
            self.evaluation = _evaluation(settings, self.report)
            record_settings(settings, self.report)

    def settle(self) -> None:
        """Return to the system what compiling left behind; called before each step."""
        self.compiler_memory.before_step()

    def serves(self, config: Config, device: torch.device) -> bool:
        """True if a model on a device needs this backend for a configuration."""
        return config == self.config and device == self.settings.place.device

    def release(self) -> None:
        """Stop watching the model's parameters, and free pinned memory."""
        if self.lowering.leaves is not None:
            self.lowering.leaves.close()
        if self.config.memory.offload:
            host_memory(self.settings.place.device).release()


def _evaluation(settings: Settings, report: Report) -> Evaluation:
    may_wait = settings.times_operators and settings.config.engine.fallback != "error"
    return Evaluation(settings.config.engine.compile_evaluation, may_wait, report)


def dynamo_backend(
    module: fx.GraphModule, inputs: Sequence[object], *, options: Mapping[str, Any] | None = None, **_: object
) -> CompiledGraph:
    """Compile a graph for `torch.compile(model, backend="ort_accel", options={"config": ...})`."""
    backend = registered(load_config((options or {}).get("config")), _device_in(inputs))
    if not torch._dynamo.config.automatic_dynamic_shapes:
        backend.report.note(FIXED_SIZES)
    return backend(module, inputs)


_REGISTERED: dict[tuple[str, torch.device], Backend] = {}


def registered(config: Config, device: torch.device = CPU.device) -> Backend:
    """Returns the one backend of `torch.compile` for a configuration and a device; all its models share a report."""
    key = (config.to_yaml(), device)
    if key not in _REGISTERED:
        _REGISTERED[key] = Backend(resolve(config, device, sees_steps=False), Report())
    return _REGISTERED[key]


def _device_in(inputs: Sequence[object]) -> torch.device:
    """Returns the CUDA device of a graph's inputs, or the CPU."""
    return next((item.device for item in inputs if isinstance(item, torch.Tensor) and item.is_cuda), CPU.device)
