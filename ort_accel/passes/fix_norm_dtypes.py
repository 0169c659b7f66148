"""Corrects the dtypes of norms of half-precision inputs on the CPU, which PyTorch's tracing reports wrongly.

1. The CPU kernels keep saved statistics in float32 if weight or running statistics are float32, else in the input's
   dtype. Tracing reports the input's dtype.
2. New running statistics of a batch norm have the dtype of the old ones. Tracing reports float32.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from ort_accel.graph.nodes import fakes_in, is_getitem, is_view
from ort_accel.lowering.onnx_graph import HALF_DTYPES
from ort_accel.passes.options import PassOptions

aten = torch.ops.aten

SAVED_STATISTICS = (1, 2)
"""Positions of the results that are saved for the backward."""

NEW_RUNNING_STATISTICS: dict[OpOverload, tuple[int, ...]] = {
    aten.native_layer_norm.default: (),
    aten.native_group_norm.default: (),
    aten._native_batch_norm_legit.no_stats: (),
    aten._native_batch_norm_legit_no_training.default: (),
    aten._native_batch_norm_legit_functional.default: (3, 4),
    aten._batch_norm_with_update_functional.default: (4, 5),
}
"""Positions of the new running statistics among each norm's results."""


def fix_norm_dtypes(graph: fx.Graph, _: PassOptions) -> int:
    """Set the dtypes that the kernels return; returns the number of norms."""
    count = 0
    for node in graph.nodes:
        if node.target in NEW_RUNNING_STATISTICS:
            operand, *others = fakes_in([item.meta.get("val") for item in node.all_input_nodes])
            if operand.dtype in HALF_DTYPES and operand.device.type == "cpu":
                is_mixed = any(item.dtype == torch.float32 for item in others)
                _correct(node, torch.float32 if is_mixed else operand.dtype)
                count += 1
    return count


def _correct(node: fx.Node, saved: torch.dtype) -> None:
    assert isinstance(node.target, OpOverload)
    dtypes = dict.fromkeys(SAVED_STATISTICS, saved)
    if positions := NEW_RUNNING_STATISTICS[node.target]:
        running = node.args[3]
        assert isinstance(running, fx.Node)
        dtypes |= dict.fromkeys(positions, running.meta["val"].dtype)
    fakes = [fake.to(dtypes.get(position, fake.dtype)) for position, fake in enumerate(node.meta["val"])]
    node.meta["val"] = tuple(fakes)
    for part in filter(is_getitem, node.users):
        position = part.args[1]
        assert isinstance(position, int)
        part.meta["val"] = fakes[position]
        for view in filter(is_view, part.users):
            view.meta["val"] = view.meta["val"].to(fakes[position].dtype)
