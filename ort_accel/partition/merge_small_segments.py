"""Small ONNX Runtime segments between PyTorch segments go to PyTorch: the handover costs more than they gain."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ort_accel.graph.nodes import fakes_in, op_name
from ort_accel.graph.symbolic_sizes import hinted_elements
from ort_accel.partition.assign import Refusal
from ort_accel.partition.segments import Cut
from ort_accel.reporting import Reason, Runner

MOST_ELEMENTS = 1 << 16
"""A segment that computes fewer elements than this in all is small."""

HEAVY = ("mm", "bmm", "convolution")
"""Parts of the names of operators that are worth a handover at any size that training meets."""


def merge_small_segments(cuts: Sequence[Cut]) -> tuple[list[Cut], dict[fx.Node, Refusal]]:
    """Joins each small segment with its neighbours. Returns all segments, and the nodes that PyTorch runs for it."""
    kept: list[Cut] = []
    given_up: dict[fx.Node, Refusal] = {}
    for index, cut in enumerate(cuts):
        runner = cut.runner
        if _is_between_pytorch(cuts, index) and _is_small(cut):
            runner = Runner.PYTORCH
            given_up |= dict.fromkeys(cut.nodes, Refusal(Reason.SMALL))
        if runner is Runner.PYTORCH and kept and kept[-1].runner is runner:
            kept[-1] = Cut(runner, [*kept[-1].nodes, *cut.nodes])
        else:
            kept.append(Cut(runner, list(cut.nodes)))
    return kept, given_up


def _is_between_pytorch(cuts: Sequence[Cut], index: int) -> bool:
    if cuts[index].runner is Runner.PYTORCH or not 0 < index < len(cuts) - 1:
        return False
    return cuts[index - 1].runner is Runner.PYTORCH is cuts[index + 1].runner


def _is_small(cut: Cut) -> bool:
    if any(part in op_name(node) for node in cut.nodes for part in HEAVY):
        return False
    return sum(hinted_elements(fake) for node in cut.nodes for fake in fakes_in(node.meta["val"])) < MOST_ELEMENTS
