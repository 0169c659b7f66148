"""Has batch norms and `max_pool1d` read contiguous tensors where tracing would report a wrong layout of the result.

For a transposed input the CPU kernels return a contiguous result, `max_pool1d` where its input has no gradient, and
tracing reports one that is transposed as the input is. A dropout behind it draws in the order of memory, and would draw
another mask than in eager mode.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._prims_common import suggest_memory_format

from ort_accel.graph.memory_layout import is_plain
from ort_accel.passes.common import example_of, is_named, recompile
from ort_accel.passes.options import PassOptions


def fix_layouts(graph: fx.Graph, _: PassOptions) -> int:
    """Copy the inputs that eager mode's result is not laid out as; returns how many."""
    count = 0
    for node in list(graph.nodes):
        is_pool = is_named(node, "max_pool1d")
        operand = node.args[0] if node.args and (is_pool or is_named(node, "batch_norm")) else None
        if not isinstance(operand, fx.Node) or (is_pool and example_of(operand).requires_grad):
            continue
        if _is_contiguous_in_eager_mode(example_of(operand)):
            with graph.inserting_before(node):
                copied = graph.call_method("contiguous", (operand,))
            copied.meta["example_value"] = example_of(operand).contiguous()
            node.replace_input_with(operand, copied)
            count += 1
    if count:
        recompile(graph)
    return count


def _is_contiguous_in_eager_mode(tensor: object) -> bool:
    """True for a tensor that is not contiguous and whose results are."""
    if not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or is_plain(tensor):
        return False
    return suggest_memory_format(tensor) == torch.contiguous_format
