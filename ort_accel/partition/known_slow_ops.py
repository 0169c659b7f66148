"""Lists operators that PyTorch runs faster than ONNX Runtime on the CPU, with the measurements that the report shows.

The list holds for operators that are not timed on this machine (`autotune/throughput.py`), and for runs that must
divide graphs alike each time. It leaves out small tensors, which stay with their neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_accel.graph.nodes import fakes_in
from ort_accel.graph.symbolic_sizes import hinted_elements
from ort_accel.lowering.onnx_graph import HALVES
from ort_accel.partition.powers import is_long_power
from ort_accel.passes.fuse.cross_entropy import JOINED

aten = torch.ops.aten

WORTH_A_CROSSING = 1 << 16
"""Elements from which on a handover costs less than the better kernel saves."""

FIGURES: dict[Any, str] = {
    JOINED: "5.8 ms and one tensor in PyTorch, 9.3 ms and two in ONNX Runtime for 1024 x 4000 elements",
    aten.gelu_backward.default: "0.8 ms in PyTorch, 6.1 ms in ONNX Runtime for 1024 x 1536 elements",
    aten.silu_backward.default: "0.3 ms in PyTorch, 1.6 ms in ONNX Runtime for 1024 x 1024 elements",
    aten.native_batch_norm_backward.default: "1.7 ms in PyTorch, 5.6 ms in ONNX Runtime for 8 x 64 x 56 x 56 elements",
    aten.native_layer_norm_backward.default: "0.1 ms in PyTorch, 0.9 ms in ONNX Runtime for 1024 x 512 elements",
    aten.slice_backward.default: "0.02 ms in PyTorch, 0.4 ms in ONNX Runtime for 256 x 512 of 256 x 1024 elements",
    aten.threshold_backward.default: "0.1 ms in PyTorch, 2.1 ms in ONNX Runtime for 1024 x 512 elements",
}

IN_HALF_PRECISION: dict[Any, str] = {
    aten._native_batch_norm_legit_functional.default: (
        "0.6 ms in PyTorch, 3.2 ms in ONNX Runtime for 8 x 64 x 56 x 56 elements in bfloat16"
    ),
}

LONG_POWER = "0.8 ms in PyTorch, 1.7 ms in ONNX Runtime for 1024 x 512 elements"


def slower(node: fx.Node) -> str | None:
    """Returns the measurement that speaks for PyTorch; None if there is none."""
    made = fakes_in(node.meta["val"])
    figures = LONG_POWER if is_long_power(node) else FIGURES.get(node.target)
    if node.target in IN_HALF_PRECISION and made[0].dtype in HALVES:
        figures = IN_HALF_PRECISION[node.target]
    return figures if figures and max(map(hinted_elements, made)) >= WORTH_A_CROSSING else None
