"""Selections and slices of tokens: only the chosen places are read of what they choose from."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from ort_accel.graph.symbolic_sizes import Size, expression, known_equal
from ort_accel.row_skipping.layout_rules import is_whole
from ort_accel.row_skipping.row_flow import Dims, value_of
from ort_accel.row_skipping.row_sets import Demand, Listed, Place, Some, lift, shift

aten = torch.ops.aten


def chosen(node: fx.Node, known: Container[fx.Node]) -> tuple[fx.Node, Some] | None:
    """The input of a selection of one token of each sequence, and what is read of it where all of the result is.
    `known` are the values that the inputs tell."""
    if node.target is aten.index.Tensor:
        return _listed(node, known)
    if node.target is not aten.select.int:
        return None
    given: Any = node.args[0]
    dim: Any = node.args[1]
    index = node.args[2]
    value = value_of(given)
    dim %= value.ndim
    if dim != 1 or value.ndim != 3 or not isinstance(index, int):
        return None
    sizes = (expression(value.shape[0]), expression(value.shape[1]))
    lifted = lift(Some((1,), frozenset([Place(index, sizes[1])])), (0, 1), sizes)
    assert isinstance(lifted, Some)
    return given, lifted


def _listed(node: fx.Node, known: Container[fx.Node]) -> tuple[fx.Node, Some] | None:
    """`hidden[torch.arange(batch), places]`, as heads take the last token of each sequence."""
    given: Any = node.args[0]
    indices: Any = node.args[1]
    sequence, *places = indices
    value = value_of(given)
    if value.ndim < 3 or len(places) != 1 or places[0] not in known or not _counts(sequence, value.shape[0]):
        return None
    batch, length = (expression(size) for size in value.shape[:2])
    index = value_of(places[0])
    if index.ndim != 1 or index.dtype not in {torch.int64, torch.int32} or expression(index.shape[0]) != batch:
        return None
    return given, Some((0, 1), frozenset([Listed(places[0], batch, length)]))


def _counts(node: Any, size: Size) -> bool:
    """Whether a node is 0, 1, 2 and so on, up to a size."""
    if not isinstance(node, fx.Node) or value_of(node).dtype != torch.int64:
        return False
    if node.target not in {aten.arange.default, aten.arange.start, aten.arange.start_step}:
        return False
    start = 0 if node.target is aten.arange.default else node.args[0]
    step = node.args[2] if len(node.args) > 2 else 1
    return (start, step) == (0, 1) and known_equal(value_of(node).shape[0], size)


def sliced(node: fx.Node, demand: Some) -> tuple[Dims, Demand] | None:
    """The rows of a slice along a dimension of rows, as rows of its input."""
    if node.target is not aten.slice.Tensor or is_whole(node):
        return None
    given = node.args[0]
    small, large = value_of(node).shape, value_of(given).shape
    dim = int(node.args[1]) % len(large) if len(node.args) > 1 else 0
    step = node.args[4] if len(node.args) > 4 else 1
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    if dim not in demand.dims or step != 1 or not isinstance(start, int):
        return None
    first = start if start >= 0 else expression(large[dim]) + start
    inner, outer = (tuple(expression(shape[d]) for d in demand.dims) for shape in (small, large))
    return demand.dims, shift(demand, demand.dims.index(dim), first, inner, outer)
