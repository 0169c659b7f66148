"""The gradient of a cross-entropy in one tensor as large as the scores.

PyTorch computes it in two steps: a tensor of zeros with one number in each row, and from that the softmax's gradient.
For a vocabulary of 30,522 and 1,024 tokens each of these tensors takes 119 MiB. Together they are `softmax * share`,
less the share at each label.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.kernels.output_buffers import placed
from ort_accel.lowering.onnx_graph import HALVES, OnnxGraph, Operand
from ort_accel.lowering.ops.losses import MEAN, Labels, shares
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


@torch.library.custom_op("ort_accel::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    grad: torch.Tensor,
    logarithms: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """The gradient with respect to the scores, from their log-softmax."""
    if logarithms.dtype in HALVES:  # the second step rounds once, where these would round after each operator
        slope = aten.nll_loss_backward(grad, logarithms, target, weight, reduction, ignore_index, total_weight)
        result: torch.Tensor = aten._log_softmax_backward_data(slope, logarithms, 1, logarithms.dtype)
        return result
    return _less_labels(logarithms.exp(), grad, target, weight, reduction, ignore_index, total_weight)


def pooled_cross_entropy_gradient(grad: torch.Tensor, logarithms: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The same, bit for bit, with large results in memory of ONNX Runtime's pool."""
    if not logarithms.is_cpu:
        plain: torch.Tensor = cross_entropy_backward(grad, logarithms, *rest)
        return plain
    dtype, sizes = logarithms.dtype, tuple(logarithms.shape)
    if dtype in HALVES:
        slope = placed(aten.nll_loss_backward.default, pooled=True)(dtype, sizes, grad, logarithms, *rest)
        return placed(aten._log_softmax_backward_data.default, pooled=True)(dtype, sizes, slope, logarithms, 1, dtype)
    return _less_labels(placed(aten.exp.default, pooled=True)(dtype, sizes, logarithms), grad, *rest)


def _less_labels(
    softmax: torch.Tensor,
    grad: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """`softmax * share`, less the share at each label, in the memory of the softmax."""
    labels = target.long()
    valid = labels != ignore_index
    places = torch.where(valid, labels, 0)
    slope = grad / total_weight if reduction == MEAN else grad
    share = torch.where(valid, slope if weight is None else slope * weight[places], 0)
    column, share = places.unsqueeze(1), share.unsqueeze(1)
    softmax.mul_(share)
    return softmax.scatter_(1, column, softmax.gather(1, column) - share)


JOINED = torch.ops.ort_accel.cross_entropy_backward.default


def fuse_cross_entropy_gradient(graph: fx.Graph) -> int:
    """Join each pair of the two steps that belong together; returns how many."""
    found = graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)
    matching = [node for node in found if _matches(node)]
    for node in matching:
        slope: Any = node.args[0]
        with graph.inserting_before(node):
            joined = graph.call_function(JOINED, slope.args)
        joined.meta = dict(node.meta)
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
        graph.erase_node(slope)
    return len(matching)


def _matches(node: fx.Node) -> bool:
    slope, logarithms, dim, dtype = node.args
    if not isinstance(slope, fx.Node) or slope.target is not aten.nll_loss_backward.default or len(slope.users) > 1:
        return False
    value = node.meta["val"]
    over_classes = value.ndim == 2 and dim in (1, -1) and _attached(slope.args[1]) is _attached(logarithms)
    return over_classes and dtype == value.dtype and len(slope.args) == len(JOINED._schema.arguments)


def _attached(node: Any) -> Any:
    """What a node is, apart from autograd's marks on it."""
    while node.target is aten.detach.default:
        node = node.args[0]
    return node


@lowers(JOINED)
def lowered(
    graph: OnnxGraph,
    grad: Operand,
    logarithms: Operand,
    target: Operand,
    weight: Operand | None,
    reduction: int,
    ignore_index: Size,
    total_weight: Operand,
) -> Any:
    labels = Labels(graph, logarithms, target, ignore_index)
    share = labels.along_classes(shares(graph, labels, grad, weight, reduction, total_weight))
    everywhere = graph.op("Mul", graph.op("Exp", logarithms), share)
    chosen = graph.op("Exp", labels.along_classes(labels.picked(logarithms)))
    at_label = graph.op("Mul", graph.op("Sub", chosen, graph.scalar(1, logarithms.dtype)), share)
    return graph.op("ScatterElements", everywhere, labels.along_classes(labels.places), at_label, axis=labels.axis)
