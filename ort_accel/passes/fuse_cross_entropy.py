"""Fuses the backward of a cross-entropy, so that one tensor of the logits' size is allocated instead of two.

PyTorch computes the gradient of the log-probabilities, a tensor with one number in each row, and from it the gradient
of the logits. Fused, the latter is `softmax * share`, less the share at each label.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.kernels.output_buffers import with_buffer
from ort_accel.lowering.onnx_graph import HALF_DTYPES, OnnxGraph, Operand, Value
from ort_accel.lowering.ops.losses import MEAN, Labels, label_gradients
from ort_accel.lowering.registry import lowers
from ort_accel.passes.common import source_of
from ort_accel.passes.options import PassOptions

aten = torch.ops.aten


@torch.library.custom_op("ort_accel::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Returns the gradient of the logits, from their log-probabilities."""
    if log_probs.dtype in HALF_DTYPES:  # PyTorch's second step rounds once, the fused formula after each operator
        slope = aten.nll_loss_backward(grad, log_probs, target, weight, reduction, ignore_index, total_weight)
        result: torch.Tensor = aten._log_softmax_backward_data(slope, log_probs, 1, log_probs.dtype)
        return result
    return _less_labels(log_probs.exp(), grad, target, weight, reduction, ignore_index, total_weight)


def pooled_cross_entropy_gradient(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Returns the same bits as `cross_entropy_backward`, with large results in ONNX Runtime's memory pool."""
    rest = target, weight, reduction, ignore_index, total_weight
    if not log_probs.is_cpu:
        plain: torch.Tensor = cross_entropy_backward(grad, log_probs, *rest)
        return plain
    dtype, sizes = log_probs.dtype, tuple(log_probs.shape)
    if dtype in HALF_DTYPES:
        slope = with_buffer(aten.nll_loss_backward.default, pooled=True)(dtype, sizes, grad, log_probs, *rest)
        return with_buffer(aten._log_softmax_backward_data.default, pooled=True)(
            dtype, sizes, slope, log_probs, 1, dtype
        )
    return _less_labels(with_buffer(aten.exp.default, pooled=True)(dtype, sizes, log_probs), grad, *rest)


def _less_labels(
    softmax: torch.Tensor,
    grad: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Returns `softmax * share`, less the share at each label, in the memory of the softmax."""
    labels = target.long()
    valid = labels != ignore_index
    places = torch.where(valid, labels, 0)
    slope = grad / total_weight if reduction == MEAN else grad
    share = torch.where(valid, slope if weight is None else slope * weight[places], 0)
    column, share = places.unsqueeze(1), share.unsqueeze(1)
    softmax.mul_(share)
    return softmax.scatter_(1, column, softmax.gather(1, column) - share)


CROSS_ENTROPY_BACKWARD: OpOverload = torch.ops.ort_accel.cross_entropy_backward.default


def fuse_cross_entropy(graph: fx.Graph, _: PassOptions) -> int:
    """Fuse each pair of steps of one loss; returns how many."""
    found = graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)
    matching = [node for node in found if _matches(node)]
    for node in matching:
        slope = source_of(node)
        with graph.inserting_before(node):
            fused = graph.call_function(CROSS_ENTROPY_BACKWARD, slope.args)
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        graph.erase_node(slope)
    return len(matching)


def _matches(node: fx.Node) -> bool:
    slope, log_probs, dim, dtype = node.args
    if not isinstance(slope, fx.Node) or slope.target is not aten.nll_loss_backward.default or len(slope.users) > 1:
        return False
    value = node.meta["val"]
    over_classes = value.ndim == 2 and dim in (1, -1) and _without_detach(slope.args[1]) is _without_detach(log_probs)
    return over_classes and dtype == value.dtype and len(slope.args) == len(CROSS_ENTROPY_BACKWARD._schema.arguments)


def _without_detach(argument: Argument) -> Argument:
    while isinstance(argument, fx.Node) and argument.target is aten.detach.default:
        argument = argument.args[0]
    return argument


@lowers(CROSS_ENTROPY_BACKWARD)
def lowered(
    graph: OnnxGraph,
    grad: Operand,
    log_probs: Operand,
    target: Operand,
    weight: Operand | None,
    reduction: int,
    ignore_index: Size,
    total_weight: Operand,
) -> Value:
    labels = Labels(graph, log_probs, target, ignore_index)
    share = labels.along_classes(label_gradients(graph, labels, grad, weight, reduction, total_weight))
    scaled = graph.op("Mul", graph.op("Exp", log_probs), share)
    at_label = graph.op("Exp", labels.along_classes(labels.picked(log_probs)))
    less_one = graph.op("Mul", graph.op("Sub", at_label, graph.scalar(1, log_probs.dtype)), share)
    places = labels.along_classes(labels.places)
    return graph.op("ScatterElements", scaled, places, less_one, axis=labels.axis)
