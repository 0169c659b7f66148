"""Rules of operators that only move numbers: into other shapes and orders, out of tensors and into larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ort_accel.graph.nodes import order_of
from ort_accel.graph.symbolic_sizes import expression, known_equal
from ort_accel.row_skipping.row_flow import (
    Dims,
    Passage,
    Rules,
    Source,
    is_full,
    of_one,
    packed_dim,
    rank_of,
    rest_of,
    value_of,
)

aten = torch.ops.aten

RULES = Rules()


@RULES.of(aten.cat)
def concatenation(node: fx.Node, dims: Dims) -> Passage | None:
    """Of parts side by side in each row. A cache of keys that begins empty adds nothing, wherever it is put."""
    given: Any = node.args[0]
    empty = frozenset(filter(_is_empty, given))
    parts = [part for part in given if part not in empty]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    dim %= rank_of(node)
    if any(rank_of(part) != rank_of(node) or value_of(part).dtype != value_of(node).dtype for part in parts):
        return None
    if len(parts) == 1:
        return Passage({parts[0]: dims}, lambda source: source.packed(parts[0]), empty)
    if dim in dims or not parts:
        return None
    place = packed_dim(dim, dims)

    def make(source: Source) -> Tensor:
        return torch.cat([source.packed(part) for part in parts], place)

    return Passage(dict.fromkeys(parts, dims), make, empty)


def _is_empty(node: fx.Node) -> bool:
    return any(known_equal(size, 0) for size in value_of(node).shape)


@RULES.of(aten.stack)
def stack(node: fx.Node, dims: Dims) -> Passage | None:
    parts: Any = node.args[0]
    dim = int(node.args[1]) % rank_of(node) if len(node.args) > 1 else 0
    if dim in dims:
        return None
    inner, place = tuple(d - (d > dim) for d in dims), packed_dim(dim, dims)
    return Passage(dict.fromkeys(parts, inner), lambda source: torch.stack([source.packed(x) for x in parts], place))


@RULES.of(aten.slice)
def part(node: fx.Node, dims: Dims) -> Passage | None:
    given: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, end, step = given
    rank = rank_of(node)
    dim = int(dim) % rank
    if is_whole(node):
        return of_one(node, dims, lambda source, x: x)
    if dim in dims:
        return None
    place = packed_dim(dim, dims)
    return of_one(
        node, dims, lambda source, x: aten.slice.Tensor(x, place, source.dense(start), source.dense(end), step)
    )


def is_whole(node: fx.Node) -> bool:
    """Whether a slice takes everything."""
    given: Any = node.args[0]
    return all(known_equal(a, b) for a, b in zip(value_of(node).shape, value_of(given).shape, strict=True))


@RULES.of(aten.select)
def selection(node: fx.Node, dims: Dims) -> Passage | None:
    given, dim, index = node.args
    dim = int(dim) % rank_of(given)
    inner = tuple(d + (d >= dim) for d in dims)
    place = packed_dim(dim, inner)
    return of_one(node, inner, lambda source, x: x.select(place, source.dense(index)))


@RULES.of(aten.index)
def places(node: fx.Node, dims: Dims) -> Passage | None:
    """Of several places along one dimension, which are the same in each row."""
    indices: Any = node.args[1]
    ((dim, index), *more) = [(dim, item) for dim, item in enumerate(indices) if item is not None]
    if more or dim in dims or rank_of(index) != 1 or value_of(index).dtype != torch.int64:
        return None
    before = [None] * packed_dim(dim, dims)
    return of_one(node, dims, lambda source, x: aten.index.Tensor(x, [*before, source.dense(index)]))


@RULES.of(aten.scatter)
def written_places(node: fx.Node, dims: Dims) -> Passage | None:
    """Of numbers that are written to places of each row, as an index for each row says."""
    given, wish, index, what = node.args[:4]
    dim: Any = wish
    dim %= rank_of(node)
    parts = [given, index, *([what] if isinstance(what, fx.Node) else [])]
    if node.target not in WRITTEN or dim in dims or not all(is_full(part, value_of(node), dims) for part in parts):
        return None
    place = packed_dim(dim, dims)

    def make(source: Source) -> Tensor:
        written = source.packed(what) if isinstance(what, fx.Node) else what
        made: Tensor = node.target(source.packed(given), place, source.packed(index), written)
        return made

    return Passage(dict.fromkeys(parts, dims), make)


WRITTEN = {aten.scatter.src, aten.scatter.value}
"""Of its forms those that write, and do not reduce."""


@RULES.of(aten.zeros_like, aten.ones_like, aten.full_like)
def constant(node: fx.Node, dims: Dims) -> Passage | None:
    """The same number everywhere."""
    return of_one(node, dims, lambda source, x: node.target(x, *node.args[1:], **node.kwargs))


@RULES.of(aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)
def parts(node: fx.Node, dims: Dims) -> Passage | None:
    schema = [argument.name for argument in node.target._schema.arguments]
    at = schema.index("dim")
    given: Any = node.args[0]
    dim: Any = node.args[at] if len(node.args) > at else 0
    dim %= rank_of(given)
    inner = tuple(d + (d >= dim) for d in dims) if node.target is aten.unbind.int else dims
    if dim in inner:
        return None
    place, between = packed_dim(dim, inner), node.args[1:at]
    return of_one(node, inner, lambda source, x: node.target(x, *between, place))


@RULES.of(aten.transpose, aten.permute, aten.t)
def permutation(node: fx.Node, dims: Dims) -> Passage | None:
    given: Any = node.args[0]
    order = order_of(node)
    inner = tuple(order[dim] for dim in dims)
    if inner != tuple(sorted(inner)):
        return None
    places = [packed_dim(order[dim], inner) for dim in rest_of(len(order), dims)]
    is_same = places == sorted(places)
    return Passage(
        {given: inner},
        lambda source: source.packed(given) if is_same else source.packed(given).permute([0, *places]),
    )


@RULES.of(aten.unsqueeze)
def unsqueezed(node: fx.Node, dims: Dims) -> Passage | None:
    dim = int(node.args[1]) % rank_of(node)
    if dim in dims:
        return None
    inner = tuple(d - (d > dim) for d in dims)
    return of_one(node, inner, lambda source, x: x.unsqueeze(packed_dim(dim, dims)))


@RULES.of(aten.expand)
def expansion(node: fx.Node, dims: Dims) -> Passage | None:
    given: Any = node.args[0]
    result = value_of(node)
    lacks = result.ndim - rank_of(given)
    sizes = [expression(result.shape[dim]) for dim in rest_of(result.ndim, dims)]
    if not is_full(given, result, dims) or not all(isinstance(size, int) for size in sizes):
        return None
    inner = tuple(dim - lacks for dim in dims)

    def make(source: Source, x: Tensor) -> Tensor:
        for _ in range(lacks - sum(d < lacks for d in dims)):
            x = x.unsqueeze(1)
        return x.expand([x.shape[0], *sizes])

    return of_one(node, inner, make)


@RULES.of(
    aten.view,
    aten.view_as,
    aten.reshape,
    aten.reshape_as,
    aten._unsafe_view,
    aten.flatten,
    aten.unflatten,
    aten.squeeze,
)
def view(node: fx.Node, dims: Dims) -> Passage | None:
    given: Any = node.args[0]
    result = value_of(node)
    inner = dims_before(value_of(given).shape, result.shape, dims)
    sizes = [expression(result.shape[dim]) for dim in rest_of(result.ndim, dims)]
    if inner is None or not all(isinstance(size, int) for size in sizes):
        return None
    before = [expression(size) for dim, size in enumerate(value_of(given).shape) if dim not in inner]

    def make(source: Source) -> Tensor:
        x = source.packed(given)
        return x if before == sizes else x.reshape([x.shape[0], *sizes])

    lends_form = frozenset(node.all_input_nodes) - {given} if node.target in LIKE_ANOTHER else frozenset()
    return Passage({given: inner}, make, lends_form)


LIKE_ANOTHER = {aten.view_as.default, aten.reshape_as.default}


def dims_before(before: Sequence[Any], after: Sequence[Any], dims: Dims) -> Dims | None:
    """The dimensions that hold the rows before a view, if it keeps rows and the rest apart."""
    found: list[int] = []
    for old, new in groups(before, after):
        inside = [dim for dim in new if dim in dims]
        if inside and len(inside) < len(new) and any(expression(after[d]) != 1 for d in new if d not in dims):
            return None
        if inside:
            found += old
    return tuple(found) if found else None


def groups(before: Sequence[Any], after: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Dimensions of two shapes that hold the same numbers, from the left."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = list(range(i, min(i + 1, len(before)))), list(range(j, min(j + 1, len(after))))
        i, j = i + len(old), j + len(new)
        while not known_equal(_product(before, old), _product(after, new)):
            if j < len(after) and (i >= len(before) or _is_behind(before, old, after, new)):
                new.append(j)
                j += 1
            elif i < len(before):
                old.append(i)
                i += 1
            else:
                return [(list(range(len(before))), list(range(len(after))))]
        groups.append((old, new))
    return groups


def _is_behind(before: Sequence[Any], old: list[int], after: Sequence[Any], new: list[int]) -> bool:
    """Whether the view's side is the one with fewer numbers so far."""
    have, want = sympy.sympify(expression(_product(after, new))), sympy.sympify(expression(_product(before, old)))
    return have != 0 and bool((want / have).is_integer)


def _product(shape: Sequence[Any], dims: Sequence[int]) -> Any:
    product: Any = 1
    for dim in dims:
        product = product * shape[dim]
    return product
