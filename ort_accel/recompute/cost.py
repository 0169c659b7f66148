"""What a node costs in time: a model, the same on every machine, so that all ranks of a run decide alike.

A node takes the longer of two times: its arithmetic, or the bytes that it reads and writes. The rates are those
measured on two cores of an AMD EPYC (Zen 4). Decisions depend on their ratio only.
"""

from __future__ import annotations

from torch import fx

from ort_accel.lowering.flops import flops
from ort_accel.lowering.nodes import fakes_in, is_part, is_view
from ort_accel.lowering.sizes import hinted_bytes

FLOPS_PER_MS = 200e6
BYTES_PER_MS = 8e6
START_MS = 0.01
"""What calling any kernel takes."""

SLOW = {"gelu": 4.0, "tanh": 4.0, "silu": 2.0, "_softmax": 2.0, "_safe_softmax": 2.0, "_log_softmax": 2.0, "pow": 2.0}
"""Operators whose functions take longer than moving their data, and how many times."""


def milliseconds(node: fx.Node) -> float:
    """The time that a node takes, at the sizes that the graph was captured with."""
    if node.op != "call_function" or is_view(node) or is_part(node):
        return 0.0
    moved = sum(hinted_bytes(fake) for item in (*node.all_input_nodes, node) for fake in fakes_in(item.meta.get("val")))
    kind = str(getattr(node.target, "overloadpacket", "")).rpartition(".")[2]
    return START_MS + max(flops(node) / FLOPS_PER_MS, SLOW.get(kind, 1.0) * moved / BYTES_PER_MS)
