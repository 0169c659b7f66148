"""Random numbers are drawn by PyTorch, in eager's order; what is done with them can run anywhere.

Eager mode draws for a dropout that nobody reads as well, and all later draws depend on that.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_settings
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

from ort_accel.graph.nodes import half_of, is_part, is_random, size_arguments
from ort_accel.kernels.dropout_mask import kept

aten = torch.ops.aten


def keeping_draws() -> AbstractContextManager[None]:
    """Traces keep what draws random numbers, read or not, while this is entered."""
    keeping: AbstractContextManager[None] = inductor_settings.patch(fallback_random=True)
    return keeping


def split_dropout(module: fx.GraphModule) -> int:
    """Part each dropout into drawing its mask and applying it; returns how many.

    The draw is the one that `native_dropout` makes, so the masks are eager's for the same seed. Of what nobody reads
    only the draws stay.
    """
    found = module.graph.find_nodes(op="call_function", target=aten.native_dropout.default)
    split = [node for node in found if _drops(node)]
    for node in split:
        _split(module.graph, node)
    module.graph.eliminate_dead_code(_is_needed)
    return len(split)


def _drops(node: fx.Node) -> bool:
    """Whether a dropout draws anything, or drops all."""
    return node.args[2] is not False and _probability(node) > 0


def _is_needed(node: fx.Node) -> bool:
    """Whether a node does more than to give its result."""
    is_idle = node.target is aten.native_dropout.default and not _drops(node)
    return (node.is_impure() or is_random(node)) and not is_idle


def _probability(node: fx.Node) -> float:
    probability = node.args[1]
    return probability if isinstance(probability, float) else float(probability)  # type: ignore[arg-type]


def _split(graph: fx.Graph, node: fx.Node) -> None:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    keep = 1 - _probability(node)
    with graph.inserting_before(node):
        mask = _draw(graph, operand, node, keep) if keep else _nothing_kept(graph, operand, node)
        dropped = graph.call_function(aten.native_dropout_backward.default, (operand, mask, 1 / (keep or 1)))
    dropped.meta = {**node.meta, "val": node.meta["val"][0]}
    for part in [user for user in node.users if is_part(user)]:
        part.replace_all_uses_with((dropped, mask)[part.args[1]])  # type: ignore[index]
        graph.erase_node(part)
    graph.erase_node(node)


def _nothing_kept(graph: fx.Graph, operand: fx.Node, node: fx.Node) -> fx.Node:
    """The mask of a dropout that drops all: eager mode draws nothing for it."""
    mask = graph.call_function(aten.zeros_like.default, (operand,), {"dtype": torch.bool})
    mask.meta = {**node.meta, "val": node.meta["val"][1]}
    return mask


def _draw(graph: fx.Graph, operand: fx.Node, node: fx.Node, keep: float) -> fx.Node:
    """The mask, drawn in the order in which the operand lies in memory.

    It is made from sizes alone, so that drawing does not wait for the operand. Numbers are drawn row after row, so a
    mask for a permuted operand is drawn as the operand lies, and then looked at as the operand is.
    """
    value = node.meta["val"][1]
    order = compute_elementwise_output_logical_to_physical_perm(operand.meta["val"])[0]
    sizes = size_arguments(graph, operand, value.shape)
    drawn = value.new_empty([value.shape[dim] for dim in order])
    laid = [sizes[dim] for dim in order]
    if value.device.type == "cpu":
        mask = graph.call_function(kept, (laid, keep, value.device))
        mask.meta = {**node.meta, "val": drawn}
    else:
        mask = _by_dropout(graph, operand, node, laid, drawn)
    if order == sorted(order):
        return mask
    back = [order.index(dim) for dim in range(len(order))]
    seen = graph.call_function(aten.permute.default, (mask, back))
    seen.meta = {**node.meta, "val": drawn.permute(back)}
    return seen


def _by_dropout(graph: fx.Graph, operand: fx.Node, node: fx.Node, sizes: list[Any], drawn: torch.Tensor) -> fx.Node:
    """A CUDA device draws within its kernel for dropout: by places in memory and the type, not by numbers."""
    like = drawn.to(operand.meta["val"].dtype)
    how: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    blank = graph.call_function(aten.empty.memory_format, (sizes,), how)
    blank.meta = {"val": like} | half_of(operand)
    dropout = graph.call_function(aten.native_dropout.default, (blank, node.args[1], True))
    dropout.meta = {**node.meta, "val": (like, drawn)}
    mask = graph.call_function(operator.getitem, (dropout, 1))
    mask.meta = {**node.meta, "val": drawn}
    return mask
