"""Tokens that are masked out of a value before something reads all of it: for a mean over real tokens, say."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from ort_accel.graph.symbolic_sizes import same_shape
from ort_accel.row_skipping.row_flow import shape_of, value_of
from ort_accel.row_skipping.row_sets import Marked, Some

aten = torch.ops.aten


def masked(node: fx.Node, known: Container[fx.Node]) -> tuple[fx.Node, Some] | None:
    """The input whose tokens an operator hides, and which of them it reads. `known` are the values that inputs tell."""
    for given, mark, hides in _readings(node):
        if isinstance(given, fx.Node) and given not in known and mark in known and _fits(node, given, mark):
            return given, Some((0, 1), frozenset([Marked(mark, hides)]))
    return None


def _readings(node: fx.Node) -> list[tuple[Any, Any, bool]]:
    """What may be hidden, by what, and what that says where it hides."""
    args: tuple[Any, ...] = node.args
    match node.target:
        case aten.mul.Tensor:
            return [(args[0], args[1], False), (args[1], args[0], False)]
        case aten.masked_fill.Scalar | aten.masked_fill.Tensor:
            return [(args[0], args[1], True)]
        case aten.where.self | aten.where.ScalarOther | aten.where.ScalarSelf:
            return [(args[1], args[0], False), (args[2], args[0], True)]
    return []


def _fits(node: fx.Node, given: fx.Node, mark: fx.Node) -> bool:
    """Whether both have all tokens, as [batch, length, ...]."""
    one, other = shape_of(given), shape_of(mark)
    if one is None or other is None or not len(one) == len(other) >= 2:
        return False
    return same_shape(one, value_of(node).shape) and same_shape(one[:2], other[:2])
