"""Replaces the transpose of a transpose by the tensor itself.

Autograd writes the gradient of a linear layer's weight as a double transpose, and reads the weight so in the backward.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import fx
from torch.fx.node import Argument

from ort_accel.graph.nodes import is_returned, permutation_of
from ort_accel.passes.common import source_of
from ort_accel.passes.options import PassOptions

aten = torch.ops.aten

TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}


def remove_double_transpose(graph: fx.Graph, _: PassOptions) -> int:
    """Read tensors in place of their double transposes; returns how often."""
    count = 0
    for node in list(graph.nodes):
        if not _is_transpose(node) or not _is_transpose(inner := node.args[0]):
            continue
        inner_order, order, source = permutation_of(inner), permutation_of(node), source_of(inner)
        if [inner_order[dim] for dim in order] == sorted(order) and not _must_be_view(node, source):
            node.replace_all_uses_with(source)
            count += 1
    for node in reversed(graph.nodes):
        if not node.users and _is_transpose(node):
            graph.erase_node(node)
    return count


def _is_transpose(node: Argument) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target in TRANSPOSES


def _must_be_view(node: fx.Node, source: fx.Node) -> bool:
    """True if a graph returns the node, and its source is an input or another result: callers expect two tensors."""
    return is_returned(node) and (source.op == "placeholder" or is_returned(source))
