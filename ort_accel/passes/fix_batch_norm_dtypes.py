"""The types of what batch norm gives for half-precision numbers on a CPU, which PyTorch's tracing tells wrongly.

The kernels keep statistics in single precision where weight or running statistics are in it, and else in the type of
the numbers; new running statistics have the type of the old ones. Tracing asks a decomposition instead, which keeps
statistics in the type of the numbers, and gives running statistics in single precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_accel.graph.nodes import fakes_in, is_part
from ort_accel.lowering.onnx_graph import HALVES

aten = torch.ops.aten

KEPT = (1, 2)
"""The places among the results of the statistics that are kept for the backward."""

MOVED: dict[Any, tuple[int, ...]] = {
    aten._native_batch_norm_legit.no_stats: (),
    aten._native_batch_norm_legit_no_training.default: (),
    aten._native_batch_norm_legit_functional.default: (3, 4),
    aten._batch_norm_with_update_functional.default: (4, 5),
}
"""For each operator the places of new running statistics."""


def tell_true_types(graph: fx.Graph) -> None:
    """Write down the types that the kernels give."""
    for node in graph.nodes:
        if node.target in MOVED:
            operand, *others = fakes_in([item.meta.get("val") for item in node.all_input_nodes])
            if operand.dtype in HALVES and operand.device.type == "cpu":
                is_mixed = any(item.dtype == torch.float32 for item in others)
                _correct(node, torch.float32 if is_mixed else operand.dtype)


def _correct(node: fx.Node, kept: torch.dtype) -> None:
    types = dict.fromkeys(KEPT, kept)
    if moved := MOVED[node.target]:
        running: Any = node.args[3]
        types |= dict.fromkeys(moved, running.meta["val"].dtype)
    fakes = [fake.to(types.get(place, fake.dtype)) for place, fake in enumerate(node.meta["val"])]
    node.meta["val"] = tuple(fakes)
    for part in filter(is_part, node.users):
        index: Any = part.args[1]
        part.meta["val"] = fakes[index]
