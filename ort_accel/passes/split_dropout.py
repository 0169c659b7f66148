"""Splits each dropout into drawing its mask, which PyTorch does, and applying it, which either runtime can do.

1. Masks are those of `native_dropout` for the same seed.
2. A dropout whose result is unused still draws, since eager mode draws and all later draws depend on it.
3. Other unused nodes are erased.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import fx
from torch._inductor import config as inductor_settings
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

from ort_accel.graph.nodes import is_getitem, is_random, partition_tag_of, size_arguments
from ort_accel.kernels.dropout_mask import kept
from ort_accel.passes.common import source_of
from ort_accel.passes.options import PassOptions

aten = torch.ops.aten


def keep_unused_draws() -> AbstractContextManager[None]:
    """Have AOTAutograd keep random operators whose result is unused, while the context is entered."""
    return cast("AbstractContextManager[None]", inductor_settings.patch(fallback_random=True))


def split_dropout(graph: fx.Graph, _: PassOptions) -> int:
    """Split dropouts; returns how many."""
    found = graph.find_nodes(op="call_function", target=aten.native_dropout.default)
    active = [node for node in found if _is_active(node)]
    for node in active:
        _split(graph, node)
    graph.eliminate_dead_code(_has_effect)
    return len(active)


def _is_active(node: fx.Node) -> bool:
    """True if a dropout is in training mode with a probability above zero."""
    return node.args[2] is not False and _probability(node) > 0


def _has_effect(node: fx.Node) -> bool:
    """True if a node with an unused result must stay, because it mutates or draws."""
    is_inactive_dropout = node.target is aten.native_dropout.default and not _is_active(node)
    return (node.is_impure() or is_random(node)) and not is_inactive_dropout


def _probability(node: fx.Node) -> float:
    return float(cast("float", node.args[1]))


def _split(graph: fx.Graph, node: fx.Node) -> None:
    operand = source_of(node)
    keep = 1 - _probability(node)
    with graph.inserting_before(node):
        mask = _draw(graph, operand, node, keep) if keep else _empty_mask(graph, operand, node)
        dropped = graph.call_function(aten.native_dropout_backward.default, (operand, mask, 1 / (keep or 1)))
    dropped.meta = {**node.meta, "val": node.meta["val"][0]}
    for part in [user for user in node.users if is_getitem(user)]:
        part.replace_all_uses_with(mask if part.args[1] else dropped)
        graph.erase_node(part)
    graph.erase_node(node)


def _empty_mask(graph: fx.Graph, operand: fx.Node, node: fx.Node) -> fx.Node:
    """Returns the mask of a dropout with probability one, for which eager mode draws nothing."""
    mask = graph.call_function(aten.zeros_like.default, (operand,), {"dtype": torch.bool})
    mask.meta = {**node.meta, "val": node.meta["val"][1]}
    return mask


def _draw(graph: fx.Graph, operand: fx.Node, node: fx.Node, keep: float) -> fx.Node:
    """Returns the mask, drawn in the order of the operand's memory.

    The mask depends on the operand's sizes alone, so that drawing does not wait for the operand. For a permuted operand
    it is drawn in memory order and then permuted.
    """
    value = node.meta["val"][1]
    order = compute_elementwise_output_logical_to_physical_perm(operand.meta["val"])[0]
    sizes = size_arguments(graph, operand, value.shape)
    drawn = value.new_empty([value.shape[dim] for dim in order])
    sizes_in_memory = [sizes[dim] for dim in order]
    if value.device.type == "cpu":
        mask = graph.call_function(kept, (sizes_in_memory, keep, value.device))
        mask.meta = {**node.meta, "val": drawn}
    else:
        mask = _draw_by_dropout(graph, node, sizes_in_memory, drawn)
    if order == sorted(order):
        return mask
    back = [order.index(dim) for dim in range(len(order))]
    permuted = graph.call_function(aten.permute.default, (mask, back))
    permuted.meta = {**node.meta, "val": drawn.permute(back)}
    return permuted


def _draw_by_dropout(graph: fx.Graph, node: fx.Node, sizes: Sequence[int | fx.Node], drawn: torch.Tensor) -> fx.Node:
    """Returns the mask of a dropout of an empty tensor: CUDA's kernel draws by memory position and dtype."""
    operand = source_of(node)
    like = drawn.to(operand.meta["val"].dtype)
    blank = graph.call_function(aten.empty.memory_format, (sizes,), {"dtype": like.dtype, "device": like.device})
    blank.meta = {"val": like} | partition_tag_of(operand)
    dropout = graph.call_function(aten.native_dropout.default, (blank, node.args[1], True))
    dropout.meta = {**node.meta, "val": (like, drawn)}
    mask = graph.call_function(operator.getitem, (dropout, 1))
    mask.meta = {**node.meta, "val": drawn}
    return mask
