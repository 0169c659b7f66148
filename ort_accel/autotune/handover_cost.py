"""What it costs to change hands between PyTorch and ONNX Runtime, and to begin at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import fx

from ort_accel.autotune.timer import Runs, Seconds
from ort_accel.lowering.onnx_graph import OnnxGraph
from ort_accel.runtime.dlpack import to_ort
from ort_accel.runtime.sessions import Sessions

SUBJECT = "handing over"
LARGE = 1 << 18
"""Elements for which PyTorch uses all its threads, so that they have to be woken up."""

WORK, BOTH, ORT, PYTORCH = "PyTorch at work", "the same, then ONNX Runtime", "onnxruntime", "pytorch"


@dataclass(frozen=True)
class Handover:
    """In seconds."""

    price: float
    """For changing hands once."""
    ort: float
    """For any segment that ONNX Runtime runs, however little it does."""
    pytorch: float
    """The same for PyTorch."""


def runs(opset: int, sessions: Sessions) -> Runs:
    """What has to be timed."""
    device = sessions.settings.place.device
    numbers, number = (torch.ones(size, dtype=torch.float32, device=device) for size in (LARGE, 1))
    session, nothing = _session(opset, sessions, number), _pytorch()

    def both() -> None:
        numbers.add(numbers)
        session()

    return {WORK: lambda: numbers.add(numbers), BOTH: both, ORT: session, PYTORCH: lambda: nothing(number)}


def handover(seconds: Seconds) -> Handover:
    """What the times mean. Going to ONNX Runtime and back is twice the price.

    It takes what ONNX Runtime takes by itself at the least: on a busy machine work alone can seem longer than both.
    """
    there_and_back = max(seconds[ORT], seconds[BOTH] - seconds[WORK])
    return Handover(there_and_back / 2, seconds[ORT], seconds[PYTORCH])


def _session(opset: int, sessions: Sessions, number: torch.Tensor) -> Callable[[], object]:
    graph = OnnxGraph(opset)
    result = graph.op("Neg", graph.input("given", number))
    result.name = "result"
    content = ir.to_proto(graph.model([result], "handover")).SerializeToString()
    session = sessions.create(content, ["given"], ["result"], SUBJECT)
    return lambda: session([to_ort(number)])


def _pytorch() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output([graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("given"),))])
    return fx.GraphModule({}, graph)
