"""Small ONNX Runtime segments between PyTorch segments are given up: getting there costs more than it gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ort_accel.graph.nodes import fakes_in, op_name
from ort_accel.graph.symbolic_sizes import hinted_elements
from ort_accel.partition.segments import Cut
from ort_accel.reporting import Runner

MOST_ELEMENTS = 1 << 16
"""Elements that an island computes in all; with fewer, PyTorch takes less time than handing tensors over (0.05 ms)."""

HEAVY = ("mm", "bmm", "convolution")
"""Parts of the names of operators that are worth a crossing at any size that training meets."""


@dataclass(frozen=True)
class Merged:
    """Segments after merging, and the nodes that PyTorch runs for this reason alone."""

    cuts: list[Cut]
    given_up: list[fx.Node]


def merge_islands(cuts: Sequence[Cut]) -> Merged:
    """Let PyTorch run each island, joined with its neighbours. Segments of ONNX Runtime in a row stay what they are."""
    kept: list[Cut] = []
    given_up: list[fx.Node] = []
    for index, cut in enumerate(cuts):
        is_island = _is_between_pytorch(cuts, index) and _is_small(cut)
        runner = Runner.PYTORCH if is_island else cut.runner
        if is_island:
            given_up += cut.nodes
        if runner is Runner.PYTORCH and kept and kept[-1].runner is runner:
            kept[-1] = Cut(runner, [*kept[-1].nodes, *cut.nodes])
        else:
            kept.append(Cut(runner, list(cut.nodes)))
    return Merged(kept, given_up)


def _is_between_pytorch(cuts: Sequence[Cut], index: int) -> bool:
    if cuts[index].runner is Runner.PYTORCH or not 0 < index < len(cuts) - 1:
        return False
    return cuts[index - 1].runner is Runner.PYTORCH is cuts[index + 1].runner


def _is_small(cut: Cut) -> bool:
    if any(part in op_name(node) for node in cut.nodes for part in HEAVY):
        return False
    return sum(hinted_elements(fake) for node in cut.nodes for fake in fakes_in(node.meta["val"])) < MOST_ELEMENTS
