"""The segments of a graph, and whose kernels compute their nodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

COVERAGE = (
    "sessions",
    "nodes",
    "nodes_in_onnxruntime",
    "nodes_by_ort_accel_in_onnxruntime",
    "nodes_by_pytorch_in_onnxruntime",
    "flops",
    "flops_in_onnxruntime",
    "flops_by_pytorch_in_onnxruntime",
)
"""The numbers of `Report.coverage`. Kernels of ort_accel and of PyTorch that a session calls count as in ONNX Runtime,
and apart."""


class Runner(StrEnum):
    """The runtime that runs a segment."""

    ORT = "onnxruntime"
    PYTORCH = "pytorch"
    INDUCTOR = "inductor"
    """A program that PyTorch's Inductor has written for the whole segment."""


class Kernels(StrEnum):
    """The kernels that compute a node, and the side that calls them."""

    ORT = "ONNX Runtime's kernels"
    NATIVE = "ort_accel's native kernels"
    CALLED = "PyTorch's kernels, called by ONNX Runtime"
    OUTSIDE = "PyTorch, outside of ONNX Runtime"


@dataclass
class Segment:
    """A run of neighbouring nodes that one runner executes."""

    graph: str
    """The name of its graph, such as `forward 0`."""
    runner: Runner
    """The last runner: PyTorch, too, where ONNX Runtime failed."""
    ops: dict[str, int]
    """The number of nodes of each operator."""
    flops: float = 0.0
    """Floating point operations of its matrix products and convolutions, at the sizes it was compiled with."""
    called_nodes: int = 0
    """The nodes of a session that are calls of PyTorch's kernels."""
    called_flops: float = 0.0
    own_nodes: int = 0
    """The nodes of a session that are calls of ort_accel's kernels."""
    own_flops: float = 0.0

    @property
    def nodes(self) -> int:
        """Returns the number of nodes."""
        return sum(self.ops.values())

    def coverage(self) -> tuple[float, ...]:
        """Returns what it adds to the numbers of `Report.coverage`."""
        share = self.runner is Runner.ORT  # 1 or 0
        nodes = self.nodes, share * self.nodes, share * self.own_nodes, share * self.called_nodes
        return share, *nodes, self.flops, share * self.flops, share * self.called_flops

    def work(self) -> dict[Kernels, tuple[int, float]]:
        """Returns the nodes and the FLOPs of each side's kernels."""
        if self.runner is not Runner.ORT:
            return {Kernels.OUTSIDE: (self.nodes, self.flops)}
        native, called = (self.own_nodes, self.own_flops), (self.called_nodes, self.called_flops)
        rest = self.nodes - native[0] - called[0], self.flops - native[1] - called[1]
        return {Kernels.ORT: rest, Kernels.NATIVE: native, Kernels.CALLED: called}
