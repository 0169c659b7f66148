"""Matches selections, slices and masks of tokens: of their input only these positions are read."""

from __future__ import annotations

from collections.abc import Container
from typing import cast

import torch
from torch import fx
from torch.fx.node import Argument

from ort_accel.graph.symbolic_sizes import Size, expression, known_equal, known_positive, same_shape
from ort_accel.row_skipping.layout_rules import is_whole
from ort_accel.row_skipping.row_flow import dim_argument, shape_of, slice_arguments, tensor_input, value_of
from ort_accel.row_skipping.row_sets import (
    FixedPosition,
    IndexedPosition,
    ReadRows,
    SizeExpression,
    SomeRows,
    Unmasked,
    broadcast,
    unslice,
)

aten = torch.ops.aten


def match_selection(node: fx.Node, input_only: Container[fx.Node]) -> tuple[fx.Node, SomeRows] | None:
    """Returns the input of a selection of one token of each sequence, and the rows that are read of it."""
    if node.target is aten.index.Tensor:
        return _match_indexed(node, input_only)
    if node.target is not aten.select.int:
        return None
    operand, index = tensor_input(node), node.args[2]
    value = value_of(operand)
    if dim_argument(node, 1, value.ndim) != 1 or value.ndim != 3 or not isinstance(index, int):
        return None
    sizes = (expression(value.shape[0]), expression(value.shape[1]))
    rows = broadcast(SomeRows((1,), frozenset([FixedPosition(index, sizes[1])])), (0, 1), sizes)
    assert isinstance(rows, SomeRows)
    return operand, rows


def _match_indexed(node: fx.Node, input_only: Container[fx.Node]) -> tuple[fx.Node, SomeRows] | None:
    """Matches `hidden[torch.arange(batch), positions]`: classifiers take the last token of each sequence so."""
    operand = tensor_input(node)
    sequence, *positions = cast("list[fx.Node]", node.args[1])
    value = value_of(operand)
    if value.ndim < 3 or len(positions) != 1 or positions[0] not in input_only:
        return None
    if not _is_arange(sequence, value.shape[0]):
        return None
    batch, length = (expression(size) for size in value.shape[:2])
    index = value_of(positions[0])
    if index.ndim != 1 or index.dtype not in {torch.int64, torch.int32} or expression(index.shape[0]) != batch:
        return None
    return operand, SomeRows((0, 1), frozenset([IndexedPosition(positions[0], batch, length)]))


def _is_arange(node: Argument, size: Size) -> bool:
    """True if a node is 0, 1, 2 and so on, up to a size."""
    if not isinstance(node, fx.Node) or value_of(node).dtype != torch.int64:
        return False
    if node.target not in {aten.arange.default, aten.arange.start, aten.arange.start_step}:
        return False
    start = 0 if node.target is aten.arange.default else node.args[0]
    step = node.args[2] if len(node.args) > 2 else 1
    return (start, step) == (0, 1) and known_equal(value_of(node).shape[0], size)


def _first_row(start: int, size: Size) -> SizeExpression | None:
    """Returns where a slice begins; None if that is before the first row for some sizes."""
    whole = expression(size)
    if start >= 0 or isinstance(whole, int):
        return start if start >= 0 else max(0, int(whole) + start)
    return whole + start if known_positive(size + start + 1) else None


def match_slice(node: fx.Node, rows: SomeRows) -> ReadRows | None:
    """Returns the rows of a slice along a dimension of rows, as rows of its input."""
    if node.target is not aten.slice.Tensor or is_whole(node):
        return None
    small, large = value_of(node).shape, value_of(tensor_input(node)).shape
    dim, start, _, step = slice_arguments(node)
    if dim not in rows.dims or step != 1 or not isinstance(start, int):
        return None
    first = _first_row(start, large[dim])
    if first is None:
        return None
    inner, outer = (tuple(expression(shape[d]) for d in rows.dims) for shape in (small, large))
    return unslice(rows, rows.dims.index(dim), first, inner, outer)


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
