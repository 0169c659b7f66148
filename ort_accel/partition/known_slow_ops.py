"""Lists operators that PyTorch runs faster than ONNX Runtime on the CPU, with the measurements that the report shows.

The list holds for operators that are not timed on this machine (`autotune/throughput.py`), and for runs that must
divide graphs alike each time. It leaves out small tensors, which stay with their neighbours.
"""

from __future__ import annotations

from torch import fx

from ort_accel.graph.nodes import fakes_in
from ort_accel.graph.symbolic_sizes import hinted_elements
from ort_accel.lowering.onnx_graph import HALF_DTYPES
from ort_accel.operators.facts import facts

MIN_HANDOVER_ELEMENTS = 1 << 16
"""Elements from which on a handover costs less than the better kernel saves."""


def slower(node: fx.Node) -> str | None:
    """Returns the measurement that speaks for PyTorch; None if there is none."""
    made = fakes_in(node.meta["val"])
    known = facts(node)
    figures = known.faster_in_pytorch if known.faster_in_pytorch_if(node) else ""
    if known.faster_in_pytorch_in_halves and made[0].dtype in HALF_DTYPES:
        figures = known.faster_in_pytorch_in_halves
    return figures if figures and max(map(hinted_elements, made)) >= MIN_HANDOVER_ELEMENTS else None
