"""Matches operators that mask tokens out of a value before all of it is read: mean pooling over real tokens, say."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx
from torch.fx.node import Argument

from ort_accel.graph.symbolic_sizes import same_shape
from ort_accel.row_skipping.row_flow import shape_of, value_of
from ort_accel.row_skipping.row_sets import SomeRows, Unmasked

aten = torch.ops.aten


def match_masked_tokens(node: fx.Node, input_only: Container[fx.Node]) -> tuple[fx.Node, SomeRows] | None:
    """Returns the input whose tokens an operator masks, and which of them it reads."""
    for operand, mask, masked_value in _masked_operands(node):
        if not isinstance(operand, fx.Node) or not isinstance(mask, fx.Node):
            continue
        if operand not in input_only and mask in input_only and _covers_tokens(node, operand, mask):
            return operand, SomeRows((0, 1), frozenset([Unmasked(mask, masked_value)]))
    return None


def _masked_operands(node: fx.Node) -> list[tuple[Argument, Argument, bool]]:
    """Returns triples: an operand that may be masked, its mask, and the mask's value where the operand is hidden."""
    args = node.args
    match node.target:
        case aten.mul.Tensor:
            return [(args[0], args[1], False), (args[1], args[0], False)]
        case aten.masked_fill.Scalar | aten.masked_fill.Tensor:
            return [(args[0], args[1], True)]
        case aten.where.self | aten.where.ScalarOther | aten.where.ScalarSelf:
            return [(args[1], args[0], False), (args[2], args[0], True)]
    return []


def _covers_tokens(node: fx.Node, operand: fx.Node, mask: fx.Node) -> bool:
    """True if operand and mask both have every token, as [batch, length, ...]."""
    one, other = shape_of(operand), shape_of(mask)
    if one is None or other is None or not len(one) == len(other) >= 2:
        return False
    return same_shape(one, value_of(node).shape) and same_shape(one[:2], other[:2])
