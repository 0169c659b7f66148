"""Fuses the backward of a cross-entropy, so that one tensor of the logits' size is allocated instead of two."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.kernels import cross_entropy
from ort_accel.lowering.onnx_graph import OnnxGraph, Operand, Value
from ort_accel.lowering.ops.losses import Labels, label_gradients
from ort_accel.lowering.registry import lowers
from ort_accel.passes.common import source_of
from ort_accel.passes.options import PassOptions

aten = torch.ops.aten


CROSS_ENTROPY_BACKWARD: OpOverload[..., Tensor] = cross_entropy.own.cross_entropy_backward.default


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
