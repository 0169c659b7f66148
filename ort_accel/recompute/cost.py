"""A cost model of operators, the same on every machine, so that all ranks of a run decide alike."""

from __future__ import annotations

from torch import fx

from ort_accel.graph.nodes import fakes_in, is_getitem, is_view
from ort_accel.graph.symbolic_sizes import hinted_bytes
from ort_accel.operators.facts import facts
from ort_accel.operators.flops import flops

FLOPS_PER_MS = 200e6
CPU_BYTES_PER_MS, DEVICE_BYTES_PER_MS = 30e6, 8e6
LAUNCH_MS = 0.01


def node_ms(node: fx.Node) -> float:
    """Returns the milliseconds that a node takes at the captured sizes."""
    if node.op != "call_function" or is_view(node) or is_getitem(node):
        return 0.0
    fakes = [fake for item in (*node.all_input_nodes, node) for fake in fakes_in(item.meta.get("val"))]
    moved_bytes = sum(map(hinted_bytes, fakes))
    if any(fake.device.type != "cpu" for fake in fakes):
        return LAUNCH_MS + max(flops(node) / FLOPS_PER_MS, moved_bytes / DEVICE_BYTES_PER_MS)
    return LAUNCH_MS + max(flops(node) / FLOPS_PER_MS, facts(node).cpu_slowdown * moved_bytes / CPU_BYTES_PER_MS)
