"""Operators that ONNX Runtime could run and PyTorch runs faster on the CPU, with the figures that say so: for those
that have no yardstick (`tune/yardsticks.py`), and for runs that must divide the work alike each time.

Measured one operator at a time, both with two threads (batch norm with one), on an AMD EPYC (Zen 4; the last three on a
Zen 5, the cross-entropy and the power on a Xeon), with onnxruntime-training-cpu 1.19.2 and torch 2.13. Handing tensors
over costs about 0.05 ms, so that small tensors stay where their neighbours are.
"""

from __future__ import annotations

from torch import fx

from ort_accel.graph.nodes import fakes_in
from ort_accel.graph.symbolic_sizes import hinted_elements
from ort_accel.lowering.onnx_graph import HALVES
from ort_accel.operators.facts import facts

WORTH_A_CROSSING = 1 << 16
"""Elements from which on handing over costs less than the better kernel saves."""


def slower(node: fx.Node) -> str | None:
    """The figures that speak for PyTorch, or None where nothing does."""
    made = fakes_in(node.meta["val"])
    known = facts(node)
    figures = known.faster_in_pytorch if known.faster_in_pytorch_if(node) else ""
    if known.faster_in_pytorch_in_halves and made[0].dtype in HALVES:
        figures = known.faster_in_pytorch_in_halves
    return figures if figures and max(map(hinted_elements, made)) >= WORTH_A_CROSSING else None
