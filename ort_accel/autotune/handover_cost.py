"""Measures what a handover between PyTorch and ONNX Runtime costs, and what starting a segment costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import fx

from ort_accel.autotune.min_cut import Costs
from ort_accel.autotune.timer import Runs, Seconds, Stopwatch
from ort_accel.lowering.onnx_graph import OnnxGraph
from ort_accel.reporting.segments import Runner
from ort_accel.runtime.dlpack import to_ort
from ort_accel.runtime.sessions import Sessions

THREADED_ELEMENTS = 1 << 18
"""Elements for which PyTorch uses all its threads, so that a handover has to wake them up."""

WORK, BOTH, ORT, PYTORCH = "PyTorch at work", "the same, then ONNX Runtime", "onnxruntime", "pytorch"


@dataclass(frozen=True)
class Handover:
    """Costs in seconds."""

    price: float
    """One change between the runtimes."""
    ort: float
    """The start of a segment that ONNX Runtime runs, however little it does."""
    pytorch: float
    """The same for PyTorch."""

    @classmethod
    def of(cls, seconds: Seconds) -> Handover:
        """Derives the costs from the times of `measure`. A way to ONNX Runtime and back is twice the price.

        The way takes at least as long as ONNX Runtime alone: on a busy machine `WORK` can seem longer than `BOTH`.
        """
        there_and_back = max(seconds[ORT], seconds[BOTH] - seconds[WORK])
        return cls(there_and_back / 2, seconds[ORT], seconds[PYTORCH])

    def without_start(self, seconds: Seconds) -> Costs:
        """Returns the times of a segment on either side without what starting it costs."""
        ort, pytorch = seconds[Runner.ORT.value], seconds[Runner.PYTORCH.value]
        return Costs(max(0.0, ort - self.ort), max(0.0, pytorch - self.pytorch))


def measure(opset: int, sessions: Sessions, stopwatch: Stopwatch, share: float = 1.0) -> Seconds | None:
    """Times both runtimes at almost no work. Returns None if the stopwatch has no time left."""
    return stopwatch.race(_runs(opset, sessions), share=share, in_a_row=3)


def _runs(opset: int, sessions: Sessions) -> Runs:
    device = sessions.settings.place.device
    numbers, number = (torch.ones(size, dtype=torch.float32, device=device) for size in (THREADED_ELEMENTS, 1))
    session, module = _session(opset, sessions, number), _pytorch()

    def both() -> None:
        numbers.add(numbers)
        session()

    return {WORK: lambda: numbers.add(numbers), BOTH: both, ORT: session, PYTORCH: lambda: module(number)}


def _session(opset: int, sessions: Sessions, number: torch.Tensor) -> Callable[[], object]:
    graph = OnnxGraph(opset)
    result = graph.op("Neg", graph.input("given", number))
    result.name = "result"
    content = ir.to_proto(graph.model([result], "handover")).SerializeToString()
    session = sessions.create(content, ["given"], ["result"], "handing over")
    return lambda: session([to_ort(number)])


def _pytorch() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output([graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("given"),))])
    return fx.GraphModule({}, graph)
