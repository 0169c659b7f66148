"""What a node costs in time: a model, the same on every machine, so that all ranks of a run decide alike.

A node takes the longer of two times: its arithmetic, or the bytes that it reads and writes. Decisions depend on the
ratio of the rates only. On the CPU it was measured on two cores of an AMD EPYC (Zen 4), in memory that the process has
already; on other devices it is that of 100 TFLOP/s beside 4 TB/s.
"""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.graph.nodes import fakes_in, is_part, is_view
from ort_accel.graph.symbolic_sizes import hinted_bytes
from ort_accel.operators.flops import flops
from ort_accel.recompute.onnx_names import packet

aten = torch.ops.aten

FLOPS_PER_MS = 200e6
BYTES_PER_MS, BYTES_PER_MS_ELSEWHERE = 30e6, 8e6
START_MS = 0.01
"""What calling any kernel takes."""

SLOW = {aten.tanh: 5.0, aten.erf: 2.5, aten.exp: 1.5, aten._log_softmax: 1.5, aten.native_layer_norm: 1.5}
"""Operators whose functions take longer on the CPU than moving their data, and how many times."""


def milliseconds(node: fx.Node) -> float:
    """The time that a node takes, at the sizes that the graph was captured with."""
    if node.op != "call_function" or is_view(node) or is_part(node):
        return 0.0
    fakes = [fake for item in (*node.all_input_nodes, node) for fake in fakes_in(item.meta.get("val"))]
    moved = sum(map(hinted_bytes, fakes))
    if any(fake.device.type != "cpu" for fake in fakes):
        return START_MS + max(flops(node) / FLOPS_PER_MS, moved / BYTES_PER_MS_ELSEWHERE)
    return START_MS + max(flops(node) / FLOPS_PER_MS, SLOW.get(packet(node), 1.0) * moved / BYTES_PER_MS)
