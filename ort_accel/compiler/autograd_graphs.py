"""Compiles a captured graph through AOTAutograd, which makes a forward and a backward of it, or an inference graph.

It uses what is private to torch: `aot_autograd`, `TracingContext.fw_metadata` and its `bw_donated_idxs`. Checked with
torch 2.11 to 2.14.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._guards import TracingContext

from ort_accel.capture.unused_outputs import PartialGradient, WithoutUnusedGradients, partial_gradients
from ort_accel.compiler.compile_graph import lower_graph
from ort_accel.compiler.lowering import Lowering
from ort_accel.compiler.settings import Settings
from ort_accel.eager.double_backward import DoubleBackward
from ort_accel.executor.program import Program
from ort_accel.graph_cache.aot_results import ProgramCode, aot_result
from ort_accel.partition.split_at_gradients import Gradients, GradientSource
from ort_accel.passes.pipeline import Stage, run_passes
from ort_accel.passes.split_dropout import keep_unused_draws
from ort_accel.recompute.backward_gradients import gradient_sources
from ort_accel.recompute.planner import MemoryPlanner
from ort_accel.recompute.split_joint_graph import GraphPair
from ort_accel.reporting.report import Report

CompiledGraph = Callable[..., Sequence[object]]
"""Takes the inputs of a captured graph, and returns its outputs."""


@dataclass
class AutogradCompiler:
    """Compiles the captured graphs of one model."""

    settings: Settings
    lowering: Lowering
    recompute: MemoryPlanner
    check: Callable[[str], None]
    """Called with a graph's name when it was lowered; raises if its fallbacks are not allowed."""
    keeps_records: bool
    """AOTAutograd's record of each graph is kept, so that the graph can be written to a file."""
    graphs: int = 0
    """The number of graphs so far."""

    def compile(self, module: fx.GraphModule, inputs: Sequence[object]) -> CompiledGraph:
        """Returns the compiled graph."""
        graph = _CapturedGraph(self, self.graphs)
        self.graphs += 1
        compile_graph = aot_autograd(
            fw_compiler=graph.forward,
            bw_compiler=graph.backward,
            inference_compiler=graph.inference,
            decompositions={},
            partition_fn=graph.split,
            keep_inference_input_mutations=True,
        )
        with keep_unused_draws(), _copied_graph(module):
            run_passes(module.graph, Stage.REDUCED, self.lowering.passes, self.lowering.report)
            run = compile_graph(module, inputs)
        if self.keeps_records:
            run = aot_result(run, module)
        self.lowering.trim_memory()
        return WithoutUnusedGradients(run, graph.partial) if graph.partial else run


@contextmanager
def _copied_graph(module: fx.GraphModule) -> Iterator[None]:
    """While the context is entered, a module has a copy of its graph. Eager mode runs the graph as it was captured."""
    original = module.graph
    module.graph = copy.deepcopy(original)
    for node, copied in zip(original.nodes, module.graph.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):  # may be None
            copied._dynamo_source = node._dynamo_source
    try:
        yield
    finally:
        module.graph = original


@dataclass
class _CapturedGraph:
    """The compilers that AOTAutograd calls for one captured graph, and what they tell each other."""

    compiler: AutogradCompiler
    number: int
    lasting: set[str] = field(default_factory=set)
    """Names of the inputs whose memory stays in place from step to step."""
    gradients: list[GradientSource | None] = field(default_factory=list)
    """The inputs that the backward's outputs are the gradients of."""
    partial: list[PartialGradient] = field(default_factory=list)
    """Gradients that depend on some outputs only."""

    def split(self, joint: fx.GraphModule, inputs: Sequence[object], **how: Any) -> GraphPair:
        """Split a joint graph into forward and backward."""
        outputs: int = how["num_fwd_outputs"]
        self.partial += partial_gradients(joint.graph, outputs)
        self._run_passes(joint.graph, Stage.JOINT)
        pair = self.compiler.recompute.partition(joint, inputs, f"graph {self.number}", **how)
        if self.compiler.lowering.leaves is not None:
            self.gradients += gradient_sources(*pair, kept_from=outputs)
        return pair

    def forward(self, module: fx.GraphModule, _: Sequence[object]) -> Program | ProgramCode:
        """Compile a forward graph."""
        return self._compile(module, Stage.FORWARD)

    def backward(self, module: fx.GraphModule, _: Sequence[object]) -> Program | ProgramCode:
        """Compile a backward graph."""
        return self._compile(module, Stage.BACKWARD, self.gradients)

    def inference(self, module: fx.GraphModule, _: Sequence[object]) -> Program | ProgramCode:
        """Compile a graph without gradients."""
        return self._compile(module, Stage.INFERENCE)

    def _compile(self, module: fx.GraphModule, stage: Stage, gradients: Gradients = ()) -> Program | ProgramCode:
        lowering, name = self.compiler.lowering, f"{str(stage.name).lower()} {self.number}"
        lowering.report.counters["compilations"] += 1
        self._run_passes(module.graph, stage)
        if stage is not Stage.BACKWARD:
            if self.compiler.settings.parameters_stay:
                self.lasting.update(_static_inputs(module))
            _keep_saved_tensors()
        program = lower_graph(module, lowering, name, lambda node: node.name in self.lasting, gradients)
        self.compiler.check(name)
        return ProgramCode(program) if self.compiler.keeps_records else program

    def _run_passes(self, graph: fx.Graph, stage: Stage) -> None:
        lowering = self.compiler.lowering
        run_passes(graph, stage, lowering.passes, lowering.report)


def _metadata() -> ViewAndMutationMeta | None:
    context = TracingContext.try_get()
    return context.fw_metadata if context else None


def _keep_saved_tensors() -> None:
    """Tell AOTAutograd that no backward overwrites saved tensors, so that it can run a second time."""
    if (metadata := _metadata()) is not None:
        metadata.bw_donated_idxs = []


def _static_inputs(module: fx.GraphModule) -> list[str]:
    """Returns the names of the inputs that are parameters and buffers."""
    metadata = _metadata()
    indices = metadata.static_input_indices if metadata else []
    placeholders = module.graph.find_nodes(op="placeholder")
    return [placeholders[index].name for index in indices if index < len(placeholders)]


def twice_differentiable(run: CompiledGraph, module: fx.GraphModule, report: Report) -> CompiledGraph:
    """Returns the compiled graph with a backward in eager mode for `create_graph=True`; unchanged for inference."""
    return DoubleBackward(run, module, _Counted(report)) if torch.is_grad_enabled() else run


@dataclass(frozen=True)
class _Counted:
    """Counts backwards in eager mode."""

    report: Report

    def __call__(self) -> None:
        self.report.counters["backwards in eager mode, for create_graph"] += 1
