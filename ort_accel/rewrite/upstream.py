"""Selections and slices of tokens: only the chosen places are read of what they choose from."""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.lowering.sizes import expression
from ort_accel.rewrite.passages import Dims, value_of
from ort_accel.rewrite.row_layout import is_whole
from ort_accel.rewrite.rows import Demand, Place, Some, lift, shift

aten = torch.ops.aten


def chosen(node: fx.Node) -> Some | None:
    """What is read of the input of a selection of one token of each sequence, all of whose result is read."""
    if node.target is not aten.select.int:
        return None
    given, dim, index = node.args
    value = value_of(given)
    dim = int(dim) % value.ndim
    if dim != 1 or value.ndim != 3 or not isinstance(index, int):
        return None
    sizes = (expression(value.shape[0]), expression(value.shape[1]))
    lifted = lift(Some((1,), frozenset([Place(index, sizes[1])])), (0, 1), sizes)
    assert isinstance(lifted, Some)
    return lifted


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
