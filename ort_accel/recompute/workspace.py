"""What operators take for themselves while they run, where that is as large as their results.

In ONNX Runtime the mask of a dropout becomes numbers twice (`lowering/ops/dropout.py`), `Where` makes two values of the
size of its result before it joins them, `ScatterElements` copies what it writes into, and the gradient of a layer norm
is computed in four values of the size of its first result. PyTorch's kernels for the CPU take little; but attention
over rows with dropout makes its products one after the other (`kernels/attention_packed.py`), and holds several of the
size of all pairs of some sequences at once; and a mask that is looked at in each step (`passes/slim_attention.py`)
becomes numbers where the kernel has to see it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ort_accel.graph.nodes import bytes_made
from ort_accel.operators.facts import facts
from ort_accel.reporting import Runner


@dataclass(frozen=True)
class Scratch:
    """What an operator takes beside what it reads and gives: bytes, of each value."""

    passing: tuple[int, ...] = ()
    """Gone when its result is made."""
    beside: tuple[int, ...] = ()
    """There with its result."""


def scratch(node: fx.Node, runner: Runner) -> Scratch:
    """What an operator takes for itself; of PyTorch's, all as one value."""
    known = facts(node)
    if runner is Runner.ORT:
        passing, beside = known.ort_workspace
        return Scratch((bytes_made(node),) * passing, (bytes_made(node),) * beside)
    taken = known.pytorch_workspace(node) if known.pytorch_workspace else 0
    return Scratch(beside=(taken,)) if taken else Scratch()
