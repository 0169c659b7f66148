"""Matches unfused attention: a product of queries and keys, masks, a softmax, and a product with the values.

Models compute attention so with `attn_implementation="eager"`, or where they change scores as no fused kernel does.
Scores and weights are still computed for all pairs. A masked key has a weight of exactly zero, so that masked keys and
unread queries need not be computed.

Scores may be sums of parts, each made from queries, keys, or both (distance embeddings, say). A sink, a score that
belongs to no key, may stand beside the scores (GPT-OSS). Batch and heads may be one dimension from the products on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import fx
from torch.fx.node import Argument

from ort_accel.graph.nodes import is_getitem, permutation_of
from ort_accel.graph.symbolic_sizes import known_equal, same_shape
from ort_accel.row_skipping.attention_match import Attention, Operand, ScoreMask
from ort_accel.row_skipping.input_graph import is_view_of_input
from ort_accel.row_skipping.layout_rules import view_groups
from ort_accel.row_skipping.row_flow import matching_dims, rank_of, shape_of, slice_arguments, tensor_input, value_of

aten = torch.ops.aten

KEEPS_MASKED = {"to", "contiguous", "clone"}
"""Operators on scores that leave a masked score masked."""

RESHAPES = {"view", "reshape", "unsafe_view"}
MASKS = {"add", "masked_fill", "where"}

ON_SCORES = KEEPS_MASKED | MASKS | {"sub", "mul", "div", "tanh"}
"""Element-wise operators on scores whose gradients are finite even for zeros."""

ON_WEIGHTS = KEEPS_MASKED | RESHAPES | {"mul", "div", "dropout", "type_as"}
"""Operators on weights that leave a zero zero."""

LARGEST = {aten.max.dim, aten.amax.default}

PRODUCTS = {aten.matmul.default, aten.bmm.default}


class _Axes(NamedTuple):
    """The dimensions of a value along which queries and keys lie."""

    query: int | None
    key: int | None


class _Read(NamedTuple):
    """A read of an inner value, which has queries or keys along these axes."""

    reader: fx.Node
    node: fx.Node
    axes: _Axes


class _Trace(NamedTuple):
    """The operands that a value is computed from, and the reads in between."""

    operands: frozenset[Operand]
    reads: frozenset[_Read]


class _Softmax(NamedTuple):
    """A softmax over keys."""

    node: fx.Node
    scores: fx.Node
    reader: fx.Node
    """The node that reads the scores: the softmax, or the concatenation with a sink."""


def match_unfused_attention(node: fx.Node) -> Attention | None:
    """Returns the attention that a node is the result of, on [batch, heads, length, width]."""
    product = _product_of(node)
    softmax = _find_softmax(product) if product else None
    if product is None or softmax is None:
        return None
    rank = rank_of(softmax.node)
    scores = _trace(softmax.scores, softmax.reader, _Axes(rank - 2, rank - 1))
    values = _trace(product.args[1], product, _Axes(None, rank_of(product) - 2))
    if scores is None or values is None or len(values.operands) > 1:
        return None
    (value,) = values.operands
    operands = [*sorted(scores.operands, key=lambda item: item.node.name), value]
    queries = [item for item in operands if item.is_query and item.dims == (0, 2)]
    keys = [item for item in operands[:-1] if not item.is_query]
    if not queries or not keys or not _are_consistent(queries[0], value, operands):
        return None
    if not _is_enclosed(scores, softmax.reader) or not _is_enclosed(values, product):
        return None
    inner = (node, softmax.node, *(read.node for read in scores.reads))
    if any(not _has_heads_of(item, queries[0].node) for item in inner):
        return None
    masks = tuple(_score_masks(softmax.scores, scores))
    parts = queries[0].node, keys[0].node, value.node
    return Attention(node, *parts, None, 0.0, False, None, tuple(operands), masks)


def _product_of(node: fx.Node) -> fx.Node | None:
    """Returns the product behind a value of [batch, heads, length, width]; its first two dimensions may be one."""
    if _is_product(node, 4):
        return node
    product = node.args[0] if _name(node) in RESHAPES else None
    if not isinstance(product, fx.Node) or not _is_product(product, 3) or set(product.users) != {node}:
        return None
    return product if rank_of(node) == 4 and _dims_after_view(node, (1, 2)) == (2, 3) else None


def _is_product(node: fx.Node, rank: int) -> bool:
    return node.target in PRODUCTS and all(rank_of(item) == rank for item in node.all_input_nodes)


def _find_softmax(product: fx.Node) -> _Softmax | None:
    """Returns the softmax over keys that computes a product's weights, through operators that keep zeros zero."""
    reader, current = product, product.args[0]
    without_sink: fx.Node | None = None
    while isinstance(current, fx.Node) and set(current.users) == {reader}:
        rank = rank_of(current)
        name = _name(current)
        if name == "softmax" and current.args[1] in (-1, rank - 1):
            if without_sink is not None:
                return _softmax_with_sink(current, without_sink)
            return _Softmax(current, tensor_input(current), current)
        if name == "slice" and without_sink is None and _takes_first_columns(current):
            reader = without_sink = current
            current = current.args[0]
            continue
        if name not in ON_WEIGHTS:
            return None
        position = 0 if name in RESHAPES else _full_operand(current)
        if position is None or (name == "div" and position == 1):
            return None
        before = rank_of(tensor_input(current)) if name in RESHAPES else 0
        if before and _dims_after_view(current, (before - 2, before - 1)) != (rank - 2, rank - 1):
            return None
        reader, current = current, current.args[position]
    return None


def _takes_first_columns(node: fx.Node) -> bool:
    """True if a slice begins at the start of the last dimension."""
    dim, start, _, step = slice_arguments(node)
    return (dim, start, step) == (rank_of(node) - 1, 0, 1)


def _softmax_with_sink(softmax: fx.Node, without_sink: fx.Node) -> _Softmax | None:
    """Matches a softmax over scores and a learned sink, which is sliced off; the scores may be shifted before."""
    joined = tensor_input(softmax)
    readers = {softmax}
    if _name(joined) == "sub" and set(joined.users) == readers:
        whole, largest = tensor_input(joined), joined.args[1]
        if not isinstance(largest, fx.Node):
            return None
        peak = tensor_input(largest) if is_getitem(largest) and largest.args[1] == 0 else largest
        if peak.target not in LARGEST or peak.args[0] is not whole or joined.kwargs:
            return None
        if peak.args[1] not in (-1, [-1], rank_of(whole) - 1, [rank_of(whole) - 1]):
            return None
        joined, readers = whole, {joined, peak}
    if _name(joined) != "cat" or set(joined.users) != readers or len(joined.args) != 2:
        return None
    parts, dim = cast("tuple[list[fx.Node], int]", joined.args)
    if len(parts) != 2 or dim not in (-1, rank_of(joined) - 1) or not is_view_of_input(parts[1]):
        return None
    scores = parts[0]
    has_all = known_equal(value_of(scores).shape[-1], value_of(without_sink).shape[-1])
    return _Softmax(softmax, scores, joined) if has_all else None


def _full_operand(node: fx.Node) -> int | None:
    """Returns the position of the first argument that has the result's shape."""
    wanted = value_of(node).shape
    for position, item in enumerate(node.args):
        if (shape := shape_of(item)) is not None and same_shape(shape, wanted):
            return position
    return None


# From scores back to queries and keys


def _trace(node: Argument, reader: fx.Node, axes: _Axes) -> _Trace | None:
    """Traces a value back to queries and keys; None if it has neither, or mixes them."""
    if not isinstance(node, fx.Node) or axes == _Axes(None, None):
        return None
    if _is_operand(node, reader, axes):
        dim = axes.key if axes.query is None else axes.query
        assert dim is not None
        operand = Operand(reader, node, (0, dim), is_query=axes.key is None)
        return _Trace(frozenset([operand]), frozenset())
    traces = [trace for item, item_axes in _sources(node, axes) if (trace := _trace(item, node, item_axes))]
    if not traces:
        return None
    operands = frozenset[Operand]().union(*(trace.operands for trace in traces))
    reads = frozenset([_Read(reader, node, axes)]).union(*(trace.reads for trace in traces))
    return _Trace(operands, reads)


def _is_operand(node: fx.Node, reader: fx.Node, axes: _Axes) -> bool:
    """True if a value is [batch, heads, length, width], or has the last two in the other order."""
    joins_heads = _name(reader) in RESHAPES and rank_of(reader) == 3
    is_read_by_product = reader.target in PRODUCTS or joins_heads
    return is_read_by_product and None in axes and rank_of(node) == 4 and not {2, 3}.isdisjoint(axes)


def _sources(node: fx.Node, axes: _Axes) -> list[tuple[Argument, _Axes]]:
    """Returns the arguments that a value's queries and keys come from, with the axes of these in them."""
    name, args = _name(node), node.args
    rank = rank_of(node) if isinstance(node.meta.get("val"), torch.Tensor) else 0
    if name in ON_SCORES and not (name == "div" and args[0] is args[1]):
        sources = args[1:3] if name == "where" else args[:2] if name in {"add", "sub", "mul"} else args[:1]
        tensors = [item for item in sources if isinstance(item, fx.Node) and shape_of(item) is not None]
        return [(item, _axes_of_operand(item, node, axes)) for item in tensors]
    if node.target in PRODUCTS:
        return _factors(tensor_input(node), tensor_input(node, 1), rank, axes)
    if name == "baddbmm":
        added, left, right = (tensor_input(node, position) for position in range(3))
        return [(added, _axes_of_operand(added, node, axes)), *_factors(left, right, rank, axes)]
    if name == "gather":
        along = cast("int", args[1]) % rank
        return [(args[0], _Axes(*(None if dim == along else dim for dim in axes)))] if along >= rank - 2 else []
    if name in {"transpose", "permute", "t"}:
        order = permutation_of(node)
        return [(args[0], _Axes(*(None if dim is None else order[dim] for dim in axes)))]
    if name in RESHAPES:
        before = _dims_before_view(node, tuple(dim for dim in axes if dim is not None))
        if before is not None:
            remaining = iter(before)
            return [(args[0], _Axes(*(None if dim is None else next(remaining) for dim in axes)))]
    return []


def _factors(left: fx.Node, right: fx.Node, rank: int, axes: _Axes) -> list[tuple[Argument, _Axes]]:
    """Returns the factors of a product: the left one has the rows of the result, the right one the columns."""
    if any(dim is not None and dim < rank - 2 for dim in axes):
        return []
    rows = _Axes(*(dim if dim == rank - 2 else None for dim in axes))
    columns = _Axes(*(dim if dim == rank - 1 else None for dim in axes))
    return [(item, item_axes) for item, item_axes in ((left, rows), (right, columns)) if rank_of(item) == rank]


def _axes_of_operand(operand: fx.Node, node: fx.Node, axes: _Axes) -> _Axes:
    """Returns the axes in an operand of an element-wise operator; None for those that are broadcast."""
    missing = rank_of(node) - rank_of(operand)
    matching = matching_dims(value_of(operand), value_of(node), tuple(dim for dim in axes if dim is not None))
    return _Axes(*(dim - missing if dim is not None and dim in matching else None for dim in axes))


def _dims_after_view(node: fx.Node, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns where these dimensions of a view's input lie in its result, if they stay whole."""
    found = dict(_kept_dims(node))
    return tuple(found[dim] for dim in dims) if set(dims) <= found.keys() else None


def _dims_before_view(node: fx.Node, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns where these dimensions of a view's result lie in its input, if they stay whole."""
    found = {new: old for old, new in _kept_dims(node)}
    return tuple(found[dim] for dim in dims) if set(dims) <= found.keys() else None


def _kept_dims(node: fx.Node) -> list[tuple[int, int]]:
    before, after = value_of(tensor_input(node)).shape, value_of(node).shape
    return [(old[0], new[0]) for old, new in view_groups(before, after) if len(old) == len(new) == 1]


# Conditions of a match


def _are_consistent(query: Operand, value: Operand, operands: list[Operand]) -> bool:
    """True if all operands have the same batch, heads and lengths, and no operand is read in two orders."""
    if value.dims != (0, 2):
        return False
    dims_of: dict[fx.Node, tuple[int, ...]] = {}
    for item in operands:
        shape, wanted = value_of(item.node).shape, value_of((query if item.is_query else value).node).shape
        if not same_shape(shape[:2], wanted[:2]) or not known_equal(shape[item.dims[1]], wanted[2]):
            return False
        if dims_of.setdefault(item.node, item.dims) != item.dims:
            return False
    return same_shape(value_of(query.node).shape[:2], value_of(value.node).shape[:2])


def _has_heads_of(node: fx.Node, query: fx.Node) -> bool:
    """True unless a value of four dimensions has another batch or other heads than the queries."""
    return rank_of(node) != 4 or same_shape(value_of(node).shape[:2], value_of(query).shape[:2])


def _is_enclosed(trace: _Trace, end: fx.Node) -> bool:
    """True if nothing outside reads the inner values, and none of them is read along two pairs of axes."""
    readers_of: dict[fx.Node, set[fx.Node]] = {}
    axes: dict[fx.Node, _Axes] = {}
    for read in trace.reads:
        readers_of.setdefault(read.node, set()).add(read.reader)
        if axes.setdefault(read.node, read.axes) != read.axes:
            return False
    inside = {end, *readers_of}
    return all(set(node.users) == readers and readers <= inside for node, readers in readers_of.items())


def _score_masks(scores: fx.Node, trace: _Trace) -> Iterator[ScoreMask]:
    """Yields operators that may mask scores, from the softmax back; stops where an operator could unmask them."""
    inner = {read.node for read in trace.reads}
    current: Argument = scores
    while isinstance(current, fx.Node) and current in inner:
        name = _name(current)
        position = 0
        if name in MASKS and "alpha" not in current.kwargs:
            positions = [position for position, item in enumerate(current.args) if item in inner]
            if len(positions) != 1 and name != "add":
                return
            if len(positions) == 1 and rank_of(current) == 4:
                yield ScoreMask(current, positions[0])
            elif name != "add":
                return
            position = positions[0]
        elif name not in KEEPS_MASKED | RESHAPES:
            return
        current = current.args[position]


def _name(node: fx.Node) -> str:
    """Returns the operator's name without its overload, the same for in-place operators."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet).removeprefix("aten.").removeprefix("_").rstrip("_") if packet else ""
