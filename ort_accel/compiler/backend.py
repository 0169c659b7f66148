"""The Dynamo backend: the whole way from a captured graph to compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any
from weakref import finalize

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from ort_accel.capture.dynamic_shapes import Foreseen
from ort_accel.capture.dynamo import FOR_DYNAMO
from ort_accel.capture.dynamo_failures import is_in_parts
from ort_accel.capture.extra_guards import as_captured, guard_overlooked
from ort_accel.capture.forward_graph import Tracer, breaks_off, own_backwards
from ort_accel.capture.sdpa_backend import attention_as
from ort_accel.capture.unused_outputs import Partial, WithoutUnused, partial_gradients
from ort_accel.compiler.compile_graph import Lowering, foreseen, lower_graph
from ort_accel.compiler.device_placement import place_for
from ort_accel.compiler.features import record_features, record_settings, refuse_missing
from ort_accel.compiler.lazy_outputs import Unread
from ort_accel.compiler.refusals import has_no_memory, refuse_forbidden, refuse_moved
from ort_accel.compiler.row_dispatch import Skipping, SkippingPolicy, Smaller, hints, tables_of
from ort_accel.compiler.runtime_settings import (
    attention,
    chosen_runtime,
    divides_alike,
    estimator,
    opset,
    products,
    session_settings,
    settings_followed,
    tuner,
)
from ort_accel.config import Config, load_config
from ort_accel.eager.comparison import EagerComparison
from ort_accel.eager.double_backward import Differentiable
from ort_accel.eager.evaluation import Evaluation
from ort_accel.eager.fallback import FallbackPolicy
from ort_accel.eager.held_outputs import KeptOutputs
from ort_accel.eager.run_eager import in_eager
from ort_accel.errors import OrtAccelError
from ort_accel.executor.program import Program
from ort_accel.graph.nodes import find_numbers_from_data
from ort_accel.graph_cache.aot_results import ProgramCode, has_records, result_of, results_can_be_kept
from ort_accel.graph_cache.store import SUFFIX, Kept, KeptGraphs, Making, parts_of, shapes
from ort_accel.kernels.output_buffers import LARGE
from ort_accel.memory.low_memory_mode import LittleHeld
from ort_accel.memory.malloc_settings import keep_freed_blocks, return_free_memory
from ort_accel.memory.step_peaks import MemoryWatch
from ort_accel.observe.density import DensityInspector
from ort_accel.observe.logs import configure, speaks
from ort_accel.observe.progress import Progress
from ort_accel.observe.report_file import ReportFile
from ort_accel.partition.split_at_gradients import Gradients, Source
from ort_accel.passes.fix_batch_norm_dtypes import tell_true_types
from ort_accel.passes.lower_precision import move_casts
from ort_accel.passes.remove_clones import leave_out_copies
from ort_accel.passes.remove_redundant_casts import propagate_casts
from ort_accel.passes.replace_masked_writes import write_by_mask
from ort_accel.passes.slim_attention import slim_attention
from ort_accel.passes.split_dropout import keeping_draws, split_dropout
from ort_accel.recompute.backward_gradients import gradients_of
from ort_accel.recompute.peak_memory import Holding
from ort_accel.recompute.planner import Recompute
from ort_accel.recompute.split_joint_graph import Pair
from ort_accel.reporting import Report
from ort_accel.row_skipping.pipeline import NothingToSkip, Proposal, propose, unread_outputs
from ort_accel.runtime.crash_journal import CrashJournal
from ort_accel.runtime.device import CPU
from ort_accel.runtime.gradient_release import Leaves
from ort_accel.runtime.host_memory import host_memory
from ort_accel.runtime.installed_ort import Flavor
from ort_accel.runtime.model_cache import ModelCache, ModelKeys
from ort_accel.runtime.ort_pool import release_unused
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import ModelFolder, Sessions
from ort_accel.runtime.signed_files import SignedFiles
from ort_accel.runtime.weight_copies import WeightCopies

Compiler = Callable[..., Program | ProgramCode]


class Backend:
    """Compiles the graphs of one model. Dynamo calls it once for each graph and set of shapes."""

    def __init__(
        self,
        config: Config,
        report: Report,
        device: torch.device = CPU.device,
        parameters_stay: bool = True,
        zero3: bool = False,
        sees_steps: bool = True,
    ) -> None:
        """`device` is the model's. `parameters_stay` says that the memory of parameters is in place from step to step,
        and may be held; `zero3`, that ZeRO stage 3 is what moves it; `sees_steps`, that a call is a whole model's, and
        that what was found out in one call can change what runs in the next."""
        refuse_missing(config)
        self.config, self.report = config, report
        self._parameters_stay, self._sees_steps = parameters_stay, sees_steps
        self._runtime = runtime = chosen_runtime(config)
        self._followed = settings_followed()
        self.place = place_for(config, runtime, device)
        settings = session_settings(config, self.place)
        record_features(config, runtime, settings, report, partitioned=zero3)
        level = config.observe.log_level
        configure(level)
        self.progress = Progress(report, level)
        self.policy = FallbackPolicy(config, report)
        self.lowering = self._lowering(settings, zero3)
        self.skipping = SkippingPolicy(config, self.report)
        self._kept_outputs = KeptOutputs() if config.compute.loss_only == "auto" else None
        self.evaluation = self._evaluation(settings)
        self.comparison = EagerComparison(config, report, self.place.device, sees_steps=sees_steps)
        self.foreseen = Foreseen()
        cutter = partial(foreseen, lowering=self.lowering)
        holding = Holding(
            shrinks=config.memory.frugal,
            shrinks_each_time=settings.shrinks,
            pool_from=self.lowering.pool_from,
            shared=self.place.torch_memory,
            steps_early=self.lowering.leaves is not None and config.optimizer.step_in_backward,
        )
        self.recompute = Recompute(config.memory, report, cutter, holding, config.observe.memory_stats)
        self._graphs = 0
        self._is_settled = True
        self._keeps_memory = False
        self._is_broken = False
        self.kept = self._kept_graphs() if parameters_stay else None
        self.report_file = self._report_file()
        self.memory_watch = self._memory_watch()
        inspect = config.density.inspect
        self.inspector = DensityInspector(report, config.density.inspect_every, level) if inspect else None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        refuse_forbidden(module, self.config.engine)
        refuse_moved(inputs, self.place)
        if has_no_memory(inputs):
            return in_eager(module)
        self.comparison.captured(module)
        guard_overlooked(module.graph)
        self._follow_pytorch()
        write_by_mask(module)
        self._is_broken |= breaks_off(module) or is_in_parts()
        known = len(self.report.segments)
        try:
            how = attention_as(self.config.compute.attention), as_captured(module.graph)
            with self.report.timed("capture"), how[0], how[1]:
                return self._kept_or_made(module, inputs)
        except (OrtAccelError, *FOR_DYNAMO):
            raise
        except KeyboardInterrupt:  # the next call compiles anew
            del self.report.segments[known:]
            raise
        except Exception as error:  # whatever it is that AOTAutograd or a pass over whole graphs fails on
            del self.report.segments[known:]
            self.policy.not_compiled("a graph", error)
            return in_eager(module)

    def _kept_or_made(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A compiled graph: what an earlier process kept, or else what is made now, which is kept."""
        if self.kept is None or TracingContext.try_get() is None:
            return self._made(module, inputs)
        context = (self.config.to_yaml(), self._graphs, self._leaves_unread, self._is_broken, self._learns_of_reading)
        name = self.kept.name(module, inputs, context)
        if name is None:
            return self._made(module, inputs)
        known = self._known() | parts_of(module)
        if (kept := self._kept(name, known, inputs)) is not None:
            self._graphs += kept.graphs
            self.evaluation.compiled_a_step(kept.seconds)
            self._left_behind()
            return kept.run
        making, graphs = Making(self.report, shapes()), self._graphs
        with results_can_be_kept():
            run = self._made(module, inputs)
        variant = f"{name}-{self.skipping.variants[0]}"
        self.kept.put(variant, lambda: making.done(run, self._graphs - graphs), known)
        return run

    def _kept(self, name: str, known: Mapping[str, Any], inputs: Sequence[Any]) -> Kept | None:
        """What is kept of a graph for the rows that count in this batch, or for all rows."""
        assert self.kept is not None
        for variant in self.skipping.variants:
            kept = self.kept.get(f"{name}-{variant}", known)
            if kept is None:
                continue
            if isinstance(kept.run, Skipping) and len(self.skipping.variants) > 1:
                self.skipping.wants_compact(kept.run.proposal, kept.run.proposal.front(hints(inputs)))
            if variant == self.skipping.variants[0]:
                return kept if self.kept.take(kept, shapes()) else None
        return None

    def _known(self) -> dict[str, Any]:
        """What a kept graph refers to in its process."""
        own: dict[str, Any] = {
            "backend": self,
            "report": self.report,
            "policy": self.policy,
            "skipping": self.skipping,
            "sessions": self.lowering.sessions,
            "copies": self.lowering.copies,
            "leaves": self.lowering.leaves,
            "kept outputs": self._kept_outputs,
            "before each segment": self.lowering.before_segments,
        }
        return {name: item for name, item in own.items() if item is not None}

    def _made(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        may_leave_out = self.skipping.wants_any or self._leaves_unread
        if may_leave_out and TracingContext.try_get() is not None:  # Dynamo knows what the sizes are
            return self._for_rows(module, inputs)
        return self._twice(self._compile(module, inputs), module)

    @property
    def _leaves_unread(self) -> bool:
        """Whether the next graph leaves out what nobody is known to read beside a loss."""
        return self.skipping.loss_only and not self._is_broken and torch.is_grad_enabled()

    @property
    def _learns_of_reading(self) -> bool:
        """Whether what is read after all is computed from the next step on, or is an error."""
        return self._sees_steps or self.config.compute.loss_only is True

    def _for_rows(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The graph for the rows that count, or the whole one where there is no gain; neither makes what is unread."""
        policy, tracer, unread = self.skipping, Tracer(inputs), Unread()
        found: Smaller | None = None
        try:
            traced = _traced(module, tracer)
            if self._leaves_unread:
                unread = Unread(traced, unread_outputs(traced, inputs, beside_sums=self._learns_of_reading))
            found = self._smaller(module, inputs, tracer, propose(traced, inputs, policy.wishes, unread.positions))
        except OrtAccelError:
            raise
        except Exception as error:  # a model that cannot be analysed runs whole, and the report says why
            policy.refused(error)
        if found is not None and found.smaller is not None:
            run = self._compile(found.smaller, [*inputs, *found.tables])
            return Skipping(found.proposal, policy, self._with(unread, run, module), module, tracer.conditions())
        tracer.conditions()
        if not self._learns_of_reading:
            unread = Unread()
        with unread.left_out_of(module):
            run = self._compile(module, inputs)
        run = self._with(unread, run, module)
        return run if found is None else Skipping(found.proposal, policy, run, module)

    def _with(self, unread: Unread, run: Callable[..., Any], module: fx.GraphModule) -> Callable[..., Any]:
        if unread.positions:
            self.skipping.leaves_unread()
        elif torch.is_grad_enabled():
            self.skipping.leaves_nothing(self._is_broken)
        return unread.stood_in_for(self._twice(run, module), module, self.skipping.was_read, self._kept_outputs)

    def _twice(self, run: Callable[..., Any], module: fx.GraphModule) -> Callable[..., Any]:
        return Differentiable(run, module, self._runs_backward_in_eager) if torch.is_grad_enabled() else run

    def _runs_backward_in_eager(self) -> None:
        self.report.counters["backwards in eager mode, for create_graph"] += 1

    def _smaller(self, module: fx.GraphModule, inputs: Sequence[Any], tracer: Tracer, proposal: Proposal) -> Smaller:
        """What can be left out of a graph, and the smaller graph where that is worth it."""
        batch = proposal.front(hints(inputs))
        if not self.skipping.wants_compact(proposal, batch):
            return Smaller(proposal)
        tables = tables_of(batch) if batch.fits else proposal.front.example(hints(inputs))
        if not tables:
            return Smaller(proposal)
        return Smaller(proposal, tracer.smaller(module, proposal.write, tables), tables)

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        number, self._graphs = self._graphs, self._graphs + 1
        static: set[str] = set()
        gradients: list[Source | None] = []
        partial: list[Partial] = []
        compile_graph = aot_autograd(
            fw_compiler=self._compiler(f"forward {number}", static),
            bw_compiler=self._compiler(f"backward {number}", static, gradients),
            inference_compiler=self._compiler(f"inference {number}", static),
            decompositions={},
            partition_fn=self._partition(f"graph {number}", gradients, partial),
            keep_inference_input_mutations=True,
        )
        with keeping_draws():
            run = compile_graph(module, inputs)
        if self.kept is not None:
            run = result_of(run, module)
        self._left_behind()
        return WithoutUnused(run, partial) if partial else run

    def settle(self) -> None:
        """Give back what compiling left behind, once, before the next step: it is of no size that steps need."""
        if not self._is_settled:
            self._is_settled = True
            self._give_back()

    def _give_back(self) -> None:
        if self._keeps_memory:
            return_free_memory()

    def _left_behind(self) -> None:
        """Give back what something left behind, at once and before the next step."""
        self._is_settled = False
        self._give_back()

    def _memory_watch(self) -> MemoryWatch | None:
        """What follows the memory of steps, where that is asked for or little is to be held."""
        wished, frugal = self.config.observe.memory_stats, self.config.memory.frugal
        self._keeps_memory = not self.place.is_cuda and keep_freed_blocks()
        if not wished and not frugal:
            return None
        prints = wished and speaks(self.config.observe.log_level)
        behind = (release_unused, self.lowering.before_segments) if frugal else ()
        watch = MemoryWatch(self.report, release_unused, prints, behind)
        finalize(self, watch.close)
        return watch

    def serves(self, config: Config, device: torch.device) -> bool:
        """Whether this is what a model on a device needs for a configuration."""
        return config == self.config and device == self.place.device

    def release(self) -> None:
        """Leave the parameters of the model, and give pinned memory back."""
        if self.lowering.leaves is not None:
            self.lowering.leaves.close()
        if self.config.memory.offload:
            host_memory(self.place.device).release()

    def _report_file(self) -> ReportFile | None:
        """Where the report goes: at the latest when this backend, or the process, comes to its end."""
        if self.config.observe.report_file is None:
            return None
        file = ReportFile(self.report, self.config.observe.report_file)
        finalize(self, file.write_if_due)
        return file

    def _follow_pytorch(self) -> None:
        """Compile by PyTorch's present settings, where they are others than those that were compiled by before."""
        if (followed := settings_followed()) == self._followed:
            return
        self._followed = followed
        self.place = place_for(self.config, self._runtime, self.place.device)
        settings = session_settings(self.config, self.place)
        self.lowering.change(**self._choices(settings))
        self.evaluation = self._evaluation(settings)
        record_settings(self.config, self._runtime, settings, self.report)

    def _evaluation(self, settings: SessionSettings) -> Evaluation:
        config = self.config
        insists = divides_alike(config, settings) or self.place.is_cuda or config.engine.fallback == "error"
        return Evaluation(config.engine.compile_evaluation, not insists, self.report)

    def _lowering(self, settings: SessionSettings, zero3: bool) -> Lowering:
        config, report = self.config, self.report
        return Lowering(
            opset=opset(config, self._runtime),
            report=report,
            unwanted=frozenset(config.engine.run_in_pytorch),
            failed=self.policy.failed,
            changed=self._left_behind,
            for_speed=config.compute.placement != "onnxruntime",
            fusions=config.compute.fusions is not False,
            copies=self._copies(),
            leaves=Leaves(report) if config.memory.early_gradient_release and not zero3 else None,
            pool_from=0 if self.place.is_cuda else inf if config.memory.frugal else LARGE,
            before_segments=(lambda: None) if config.memory.budget is None or self.place.is_cuda else LittleHeld(),
            **self._choices(settings),
        )

    def _choices(self, settings: SessionSettings) -> dict[str, Any]:
        """The sessions, and what chooses between them and PyTorch, for sessions that run like this."""
        config, runtime, report = self.config, self._runtime, self.report
        sessions = self._sessions(runtime, settings)
        timed = products(config, runtime, settings, report)
        return {
            "sessions": sessions,
            "products": timed,
            "estimator": estimator(config, runtime, settings, timed),
            "attention": attention(config, runtime, settings, report),
            "tuner": tuner(config, runtime, sessions.without_trace(), report),
        }

    def _sessions(self, runtime: Flavor, settings: SessionSettings) -> Sessions:
        folder = self.config.engine.cache_dir
        if folder is None:
            return Sessions(settings, folder=self._folder())
        keys = ModelKeys(f"{runtime.distribution} {runtime.version}\ntorch {torch.__version__}\n{settings}")
        cache, journal = ModelCache(folder, keys, self.report), CrashJournal(folder, keys, self.report)
        return Sessions(settings, cache, self._folder(), journal)

    def _kept_graphs(self) -> KeptGraphs | None:
        folder = self.config.engine.cache_dir
        if folder is None or self.place.is_cuda or not has_records():
            return None
        return KeptGraphs(SignedFiles(folder, SUFFIX, self.report), self.report)

    def _copies(self) -> WeightCopies | None:
        wish = self.config.precision.cache_cast_weights
        return None if wish is False or not self._parameters_stay else WeightCopies(wish, self.report)

    def _folder(self) -> ModelFolder | None:
        engine = self.config.engine
        return ModelFolder(engine.save_onnx, engine.onnx_prefix) if engine.save_onnx else None

    def _make_lean(self, graph: fx.Graph) -> None:
        """Leave out what a whole graph need not compute, before it is divided."""
        if self.lowering.fusions:
            self._leave_out(graph)
        self._propagate_casts(graph)

    def _leave_out(self, graph: fx.Graph) -> None:
        if count := leave_out_copies(graph):
            self.report.counters["copies left out"] += count
        if count := slim_attention(graph):
            self.report.counters["attention without repeated keys and needless masks"] += count

    def _propagate_casts(self, graph: fx.Graph) -> None:
        wish = self.config.precision.cast_propagation
        if wish.level == 2 and (moved := move_casts(graph, wish.allow, wish.strategy)):
            self.report.counters["operators moved into the smaller type"] += moved
        if wish.level and (count := propagate_casts(graph)):
            self.report.counters["casts left out"] += count

    def _compiler(self, name: str, static: set[str], gradients: Gradients = ()) -> Compiler:
        """A compiler for one of the graphs; `static` passes the names of lasting inputs from forward to backward."""

        def compile_graph(module: fx.GraphModule, _: Sequence[Any]) -> Program | ProgramCode:
            self.report.counters["compilations"] += 1
            find_numbers_from_data(module.graph)
            if not name.startswith("backward"):
                tell_true_types(module.graph)
                split_dropout(module)
                static.update(_lasting_inputs(module) if self._parameters_stay else ())
                _keep_what_is_saved()
            if name.startswith("inference"):
                self._make_lean(module.graph)
            program = lower_graph(module, self.lowering, name, lambda node: node.name in static, gradients)
            self.policy.check(name)
            return program if self.kept is None else ProgramCode(program)

        return compile_graph

    def _partition(self, name: str, gradients: list[Source | None], partial: list[Partial]) -> Callable[..., Pair]:
        """A function that divides a joint graph into forward and backward, and notes whose gradients there are, and
        which of them come from some outputs only."""

        def divide(joint: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Pair:
            partial.extend(partial_gradients(joint.graph, how["num_fwd_outputs"]))
            find_numbers_from_data(joint.graph)
            tell_true_types(joint.graph)
            split_dropout(joint)
            self._make_lean(joint.graph)
            pair = self.recompute.partition(joint, inputs, name, **how)
            if self.lowering.leaves is not None:
                gradients.extend(gradients_of(*pair, kept_from=how["num_fwd_outputs"]))
            return pair

        return divide


def _traced(module: fx.GraphModule, tracer: Tracer) -> fx.GraphModule:
    if own_backwards(module):
        raise NothingToSkip("a part of the model has a backward of its own")
    return tracer.trace(module)


def _metadata() -> Any:
    """What AOTAutograd found out about the graph that it compiles; None where it does not say."""
    context = TracingContext.try_get()
    return context.fw_metadata if context else None


def _keep_what_is_saved() -> None:
    """Tell AOTAutograd that no backward writes over what its forward saved, so that another one may follow it."""
    if (metadata := _metadata()) is not None:
        metadata.bw_donated_idxs = []


def _lasting_inputs(module: fx.GraphModule) -> list[str]:
    """Parameters and buffers among the inputs: their memory stays in place from step to step."""
    metadata = _metadata()
    indices = metadata.static_input_indices if metadata else []
    placeholders = module.graph.find_nodes(op="placeholder")
    return [placeholders[index].name for index in indices if index < len(placeholders)]


def dynamo_backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """`torch.compile(model, backend="ort_accel", options={"config": ...})`."""
    backend = registered(load_config((options or {}).get("config")), _device_in(inputs))
    if not torch._dynamo.config.automatic_dynamic_shapes:
        backend.report.note(FIXED_SIZES)
    return backend(module, inputs)


FIXED_SIZES = (
    "torch.compile was called with dynamic=False: each new size is compiled anew, and after 8 of them PyTorch runs the "
    "model; `accelerate launch` does so unless --dynamo_use_dynamic is given"
)

_REGISTERED: dict[tuple[str, torch.device], Backend] = {}


def registered(config: Config, device: torch.device = CPU.device) -> Backend:
    """The one backend of `torch.compile` with this configuration on a device; its report covers all such models."""
    key = (config.to_yaml(), device)
    if key not in _REGISTERED:
        _REGISTERED[key] = Backend(config, Report(), device, sees_steps=False)
    return _REGISTERED[key]


def _device_in(inputs: Sequence[Any]) -> torch.device:
    """The CUDA device that a graph works on, or the CPU."""
    return next((item.device for item in inputs if isinstance(item, torch.Tensor) and item.is_cuda), CPU.device)
