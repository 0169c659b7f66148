"""Operators that work row by row: from which rows of its inputs each row of a result is made, and how to make it.

For every family of operators there is one function. It takes a node and the dimensions of its result along which the
rows lie, and returns a `Passage`, or None if the operator mixes rows. In the packed form of a value the rows stand in
the first dimension, and the other dimensions follow in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor, fx

from ort_accel.lowering.sizes import expression, known_equal

aten = torch.ops.aten

Dims = tuple[int, ...]


class Source(Protocol):
    """Gives the inputs of an operator while a smaller graph is written."""

    def packed(self, node: fx.Node) -> Tensor:
        """An input with rows, in its packed form."""

    def dense(self, value: Any) -> Any:
        """An input without rows, or an argument that is no tensor, as it is."""

    def along(self, value: Tensor, dim: int, axis: int) -> Tensor:
        """A value that changes along one axis of the rows only, which is its dimension `dim`, for each row."""


@dataclass(frozen=True)
class Passage:
    """How the rows of a result come from rows of the inputs."""

    needs: dict[fx.Node, Dims]
    """Inputs with rows, and the dimensions along which these lie."""
    make: Callable[[Source], Any]


Rule = Callable[[fx.Node, Dims], Passage | None]

RULES: dict[Any, Rule] = {}


def passage(node: fx.Node, dims: Dims) -> Passage | None:
    """How a node makes these rows; None where it mixes rows or is not known."""
    packet = getattr(node.target, "overloadpacket", None)
    rule = RULES.get(packet)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = elementwise
    if rule is None or getattr(node.target, "_schema", None) is None or node.target._schema.is_mutable:
        return None
    return rule(node, dims)


def works_on(*packets: Any) -> Callable[[Rule], Rule]:
    """Register the rule of some operators."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(packets, rule))
        return rule

    return register


def value_of(node: fx.Node) -> Tensor:
    """The fake tensor of a node; the first one of several."""
    value = node.meta["val"]
    return value[0] if isinstance(value, tuple | list) else value


def packed_dim(dim: int, dims: Dims) -> int:
    """Where a dimension that holds no rows stands in the packed form."""
    return 1 + dim - sum(other < dim for other in dims)


def rest_of(rank: int, dims: Dims) -> list[int]:
    """The dimensions that hold no rows."""
    return [dim for dim in range(rank) if dim not in dims]


# An operand of an element-wise operator: `dims` of the result that it has in full, and how many leading ones it lacks.


def _held(operand: Tensor, result: Tensor, dims: Dims) -> Dims:
    lacks = result.ndim - operand.ndim
    return tuple(d for d in dims if d >= lacks and known_equal(operand.shape[d - lacks], result.shape[d]))


def _operand(source: Source, node: fx.Node, result: Tensor, dims: Dims) -> Tensor:
    fake: Tensor = node.meta["val"]
    lacks, held = result.ndim - fake.ndim, _held(fake, result, dims)
    if held == dims:
        value = source.packed(node)
    else:
        value = source.dense(node)
        if held:
            value = source.along(value, held[0] - lacks, dims.index(held[0]))
        gone = [packed_dim(d - lacks, (held[0] - lacks,)) if held else d - lacks for d in dims if d not in held]
        for dim in sorted((d for d in gone if d >= 0), reverse=True):
            value = value.squeeze(dim)
        if not held:
            return value
    for _ in range(lacks - sum(d < lacks for d in dims)):
        value = value.unsqueeze(1)
    return value


@works_on(
    aten.to,
    aten.type_as,
    aten.contiguous,
    aten.clone,
    aten.detach,
    aten.alias,
    aten.__and__,
    aten.__or__,
    aten.masked_fill,
    aten.where,
    aten.rsub,
    aten.silu,
)
def elementwise(node: fx.Node, dims: Dims) -> Passage | None:
    result = value_of(node)
    operands = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    if any(len(_held(value_of(a), result, dims)) not in (0, 1, len(dims)) for a in operands):
        return None
    full = {a: tuple(d - result.ndim + value_of(a).ndim for d in dims) for a in operands if _is_full(a, result, dims)}
    if not full:
        return None
    if node.target is aten.type_as.default or "memory_format" in node.kwargs:
        return _unary(node, full)

    def make(source: Source) -> Any:
        def convert(item: Any) -> Any:
            if isinstance(item, fx.Node) and isinstance(item.meta.get("val"), Tensor):
                return _operand(source, item, result, dims)
            return source.dense(item)

        return node.target(*fx.map_arg(node.args, convert), **fx.map_arg(node.kwargs, convert))

    return Passage(full, make)


def _is_full(operand: fx.Node, result: Tensor, dims: Dims) -> bool:
    return _held(value_of(operand), result, dims) == dims


def _unary(node: fx.Node, full: dict[fx.Node, Dims]) -> Passage | None:
    """A change of type or of the memory's order; the packed form is in order anyway."""
    given = node.args[0]
    if given not in full:
        return None
    dtype = value_of(node).dtype
    return Passage({given: full[given]}, lambda source: source.packed(given).to(dtype))


def _one(node: fx.Node, dims: Dims, make: Callable[[Source, Tensor], Any]) -> Passage:
    """A passage for an operator with one input that has rows."""
    given: Any = node.args[0]
    return Passage({given: dims}, lambda source: make(source, source.packed(given)))


def _rank(node: Any) -> int:
    return value_of(node).ndim


@works_on(aten.linear)
def linear(node: fx.Node, dims: Dims) -> Passage | None:
    given: Any = node.args[0]
    if _rank(given) - 1 in dims or _rank(node) != _rank(given):
        return None
    return _one(node, dims, lambda source, x: node.target(x, *map(source.dense, node.args[1:])))


@works_on(aten.mm, aten.matmul)
def product(node: fx.Node, dims: Dims) -> Passage | None:
    given, weight = node.args[:2]
    if _rank(weight) != 2 or _rank(given) < 2 or _rank(given) - 1 in dims:
        return None
    return _one(node, dims, lambda source, x: torch.matmul(x, source.dense(weight)))


@works_on(aten.addmm)
def added_product(node: fx.Node, dims: Dims) -> Passage | None:
    bias, given, weight = node.args
    if dims != (0,) or node.kwargs or _rank(bias) != 1:
        return None

    def make(source: Source) -> Tensor:
        return aten.addmm.default(source.dense(bias), source.packed(given), source.dense(weight))

    return Passage({given: dims}, make)


@works_on(aten.layer_norm, aten.rms_norm)
def norm(node: fx.Node, dims: Dims) -> Passage | None:
    shape: Any = node.args[1]
    if max(dims) >= _rank(node) - len(shape):
        return None
    return _one(node, dims, lambda source, x: node.target(x, *map(source.dense, node.args[1:]), **node.kwargs))


@works_on(aten.embedding)
def embedding(node: fx.Node, dims: Dims) -> Passage | None:
    weight, ids, *more = node.args
    if _rank(node) - 1 in dims:
        return None

    def make(source: Source) -> Tensor:
        return aten.embedding.default(source.dense(weight), source.packed(ids), *more)

    return Passage({ids: dims}, make)


@works_on(aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax, aten.cumsum, aten.glu)
def along_one_dimension(node: fx.Node, dims: Dims) -> Passage | None:
    rank = _rank(node)
    dim: Any = node.args[1] if len(node.args) > 1 else -1
    if not isinstance(dim, int) or dim % rank in dims:
        return None
    more, place = node.args[2:], packed_dim(dim % rank, dims)
    return _one(node, dims, lambda source, x: node.target(x, place, *more, **node.kwargs))


@works_on(aten.mean, aten.sum, aten.amax, aten.amin, aten.var, aten.std, aten.logsumexp, aten.norm, aten.argmax)
def reduction(node: fx.Node, dims: Dims) -> Passage | None:
    given: Any = node.args[0]
    schema = [argument.name for argument in node.target._schema.arguments]
    if "dim" not in schema or schema.index("dim") != 1 or len(node.args) < 2 or node.args[1] is None:
        return None
    rank = _rank(given)
    wish: Any = node.args[1]
    over = [dim % rank for dim in (wish if isinstance(wish, list | tuple) else [wish])]
    at = schema.index("keepdim")
    keep = bool(node.args[at] if len(node.args) > at else node.kwargs.get("keepdim", False))
    inner = dims if keep else tuple(rest_of(rank, tuple(over))[dim] for dim in dims)
    if not over or set(over) & set(inner):
        return None
    places: Any = [packed_dim(dim, inner) for dim in over]
    places = places if isinstance(wish, list | tuple) else places[0]
    more = node.args[2:]
    return _one(node, inner, lambda source, x: node.target(x, places, *more, **node.kwargs))


@works_on(aten.cat)
def concatenation(node: fx.Node, dims: Dims) -> Passage | None:
    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    dim %= _rank(node)
    if dim in dims or any(_rank(part) != _rank(node) for part in parts):
        return None
    place = packed_dim(dim, dims)
    return Passage(dict.fromkeys(parts, dims), lambda source: torch.cat([source.packed(part) for part in parts], place))


@works_on(aten.stack)
def stack(node: fx.Node, dims: Dims) -> Passage | None:
    parts: Any = node.args[0]
    dim = int(node.args[1]) % _rank(node) if len(node.args) > 1 else 0
    if dim in dims:
        return None
    inner, place = tuple(d - (d > dim) for d in dims), packed_dim(dim, dims)
    return Passage(dict.fromkeys(parts, inner), lambda source: torch.stack([source.packed(x) for x in parts], place))


@works_on(aten.slice)
def part(node: fx.Node, dims: Dims) -> Passage | None:
    given: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, end, step = given
    rank = _rank(node)
    dim = int(dim) % rank
    if is_whole(node):
        return _one(node, dims, lambda source, x: x)
    if dim in dims:
        return None
    place = packed_dim(dim, dims)
    return _one(node, dims, lambda source, x: aten.slice.Tensor(x, place, source.dense(start), source.dense(end), step))


def is_whole(node: fx.Node) -> bool:
    """Whether a slice takes everything."""
    given: Any = node.args[0]
    return all(known_equal(a, b) for a, b in zip(value_of(node).shape, value_of(given).shape, strict=True))


@works_on(aten.select)
def selection(node: fx.Node, dims: Dims) -> Passage | None:
    given, dim, index = node.args
    dim = int(dim) % _rank(given)
    inner = tuple(d + (d >= dim) for d in dims)
    place = packed_dim(dim, inner)
    return _one(node, inner, lambda source, x: x.select(place, source.dense(index)))


@works_on(aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)
def parts(node: fx.Node, dims: Dims) -> Passage | None:
    schema = [argument.name for argument in node.target._schema.arguments]
    at = schema.index("dim")
    given: Any = node.args[0]
    dim: Any = node.args[at] if len(node.args) > at else 0
    dim %= _rank(given)
    inner = tuple(d + (d >= dim) for d in dims) if node.target is aten.unbind.int else dims
    if dim in inner:
        return None
    place, between = packed_dim(dim, inner), node.args[1:at]
    return _one(node, inner, lambda source, x: node.target(x, *between, place))


@works_on(aten.dropout)
def dropout(node: fx.Node, dims: Dims) -> Passage | None:
    """Applying a mask; who writes the graph draws it."""
    return _one(node, dims, lambda source, x: x)


@works_on(aten.transpose, aten.permute, aten.t)
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


def order_of(node: fx.Node) -> list[int]:
    """The order of a permutation of dimensions."""
    rank = _rank(node)
    if node.target is aten.permute.default:
        wish: Any = node.args[1]
        return [dim % rank for dim in wish]
    first, second = node.args[1:] if node.target is aten.transpose.int else (0, max(rank - 1, 0))
    order = list(range(rank))
    order[int(first)], order[int(second)] = order[int(second)], order[int(first)]
    return order


@works_on(aten.unsqueeze)
def unsqueezed(node: fx.Node, dims: Dims) -> Passage | None:
    dim = int(node.args[1]) % _rank(node)
    if dim in dims:
        return None
    inner = tuple(d - (d > dim) for d in dims)
    return _one(node, inner, lambda source, x: x.unsqueeze(packed_dim(dim, dims)))


@works_on(aten.expand)
def expansion(node: fx.Node, dims: Dims) -> Passage | None:
    given: Any = node.args[0]
    result = value_of(node)
    lacks = result.ndim - _rank(given)
    sizes = [expression(result.shape[dim]) for dim in rest_of(result.ndim, dims)]
    if not _is_full(given, result, dims) or not all(isinstance(size, int) for size in sizes):
        return None
    inner = tuple(dim - lacks for dim in dims)

    def make(source: Source, x: Tensor) -> Tensor:
        for _ in range(lacks - sum(d < lacks for d in dims)):
            x = x.unsqueeze(1)
        return x.expand([x.shape[0], *sizes])

    return _one(node, inner, make)


@works_on(aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.squeeze)
def view(node: fx.Node, dims: Dims) -> Passage | None:
    given: Any = node.args[0]
    result = value_of(node)
    inner = dims_before(value_of(given).shape, result.shape, dims)
    sizes = [expression(result.shape[dim]) for dim in rest_of(result.ndim, dims)]
    if inner is None or not all(isinstance(size, int) for size in sizes):
        return None
    before = [expression(size) for dim, size in enumerate(value_of(given).shape) if dim not in inner]
    if before == sizes:
        return _one(node, inner, lambda source, x: x)
    return _one(node, inner, lambda source, x: x.reshape([x.shape[0], *sizes]))


def dims_before(before: Sequence[Any], after: Sequence[Any], dims: Dims) -> Dims | None:
    """The dimensions that hold the rows before a view, if it keeps rows and the rest apart."""
    found: list[int] = []
    for old, new in _groups(before, after):
        inside = [dim for dim in new if dim in dims]
        if inside and len(inside) < len(new) and any(expression(after[d]) != 1 for d in new if d not in dims):
            return None
        if inside:
            found += old
    return tuple(found) if found else None


def _groups(before: Sequence[Any], after: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
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
