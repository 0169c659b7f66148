"""Rules of operators that compute: element by element, or along dimensions that hold no rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.kernels.token_log_probs import token_scores
from ort_accel.row_skipping.row_flow import (
    Dims,
    Passage,
    Rules,
    Source,
    held_in_full,
    is_full,
    of_one,
    packed_dim,
    rank_of,
    rest_of,
    value_of,
)

aten = torch.ops.aten

RULES = Rules()


def _operand(source: Source, node: fx.Node, result: Tensor, dims: Dims) -> Tensor:
    """An operand that has `dims` of the result in full, or one of them, or none; it may lack leading dimensions."""
    fake: Tensor = node.meta["val"]
    lacks, held = result.ndim - fake.ndim, held_in_full(fake, result, dims)
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


@RULES.of(
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
    if any(len(held_in_full(value_of(a), result, dims)) not in (0, 1, len(dims)) for a in operands):
        return None
    full = {a: tuple(d - result.ndim + value_of(a).ndim for d in dims) for a in operands if is_full(a, result, dims)}
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


def _unary(node: fx.Node, full: dict[fx.Node, Dims]) -> Passage | None:
    """A change of type or of the memory's order; the packed form is in order anyway."""
    given = node.args[0]
    if given not in full:
        return None
    dtype = value_of(node).dtype
    lends_type = frozenset(node.all_input_nodes) - {given}
    return Passage({given: full[given]}, lambda source: source.packed(given).to(dtype), lends_type)


@RULES.of(aten.dropout)
def dropout(node: fx.Node, dims: Dims) -> Passage | None:
    """Applying a mask; who writes the graph draws it."""
    return of_one(node, dims, lambda source, x: x)


@RULES.of(aten.linear)
def linear(node: fx.Node, dims: Dims) -> Passage | None:
    given: Any = node.args[0]
    if rank_of(given) - 1 in dims or rank_of(node) != rank_of(given):
        return None
    return of_one(node, dims, lambda source, x: node.target(x, *map(source.dense, node.args[1:])))


@RULES.of(aten.mm, aten.matmul)
def product(node: fx.Node, dims: Dims) -> Passage | None:
    given, weight = node.args[:2]
    if rank_of(weight) != 2 or rank_of(given) < 2 or rank_of(given) - 1 in dims:
        return None
    return of_one(node, dims, lambda source, x: torch.matmul(x, source.dense(weight)))


@RULES.of(aten.addmm)
def added_product(node: fx.Node, dims: Dims) -> Passage | None:
    bias, given, weight = node.args
    if dims != (0,) or node.kwargs or rank_of(bias) != 1:
        return None

    def make(source: Source) -> Tensor:
        return aten.addmm.default(source.dense(bias), source.packed(given), source.dense(weight))

    return Passage({given: dims}, make)


@RULES.of(aten.layer_norm, aten.rms_norm)
def norm(node: fx.Node, dims: Dims) -> Passage | None:
    shape: Any = node.args[1]
    if max(dims) >= rank_of(node) - len(shape):
        return None
    return of_one(node, dims, lambda source, x: node.target(x, *map(source.dense, node.args[1:]), **node.kwargs))


@RULES.of(aten.embedding)
def embedding(node: fx.Node, dims: Dims) -> Passage | None:
    weight, ids, *more = node.args
    if rank_of(node) - 1 in dims:
        return None

    def make(source: Source) -> Tensor:
        return aten.embedding.default(source.dense(weight), source.packed(ids), *more)

    return Passage({ids: dims}, make)


@RULES.of(aten.topk)
def largest(node: fx.Node, dims: Dims) -> Passage | None:
    """The largest numbers of each row, and where they are."""
    given, count, *more = node.args
    dim: Any = more[0] if more else -1
    place = packed_dim(dim % rank_of(given), dims)
    if node.kwargs or dim % rank_of(given) in dims:
        return None
    return of_one(node, dims, lambda source, x: aten.topk.default(x, count, place, *more[1:]))


@RULES.of(aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax, aten.cumsum, aten.glu)
def along_one_dimension(node: fx.Node, dims: Dims) -> Passage | None:
    rank = rank_of(node)
    dim: Any = node.args[1] if len(node.args) > 1 else -1
    if not isinstance(dim, int) or dim % rank in dims:
        return None
    more, place = node.args[2:], packed_dim(dim % rank, dims)
    return of_one(node, dims, lambda source, x: node.target(x, place, *more, **node.kwargs))


@RULES.of(torch.ops.ort_accel.token_scores)
def scores_of_targets(node: fx.Node, dims: Dims) -> Passage | None:
    scores, targets = node.args

    def make(source: Source) -> Any:
        return token_scores(source.packed(scores), source.packed(targets))

    return Passage({scores: dims, targets: dims}, make)


@RULES.of(aten.gather)
def gather(node: fx.Node, dims: Dims) -> Passage | None:
    """Picks in each row, by an index for each row: the score of each token's label, say. There may be more rows to pick
    from, behind those that are."""
    given, wish, index = node.args[:3]
    dim = int(wish) % rank_of(node)
    if dim in dims or dims[0] != 0 or not is_full(given, value_of(node), dims[1:]):
        return None
    place = packed_dim(dim, dims)

    def make(source: Source) -> Tensor:
        return torch.gather(source.packed(given), place, source.packed(index))

    return Passage({given: dims, index: dims}, make)


@RULES.of(aten.mean, aten.sum, aten.amax, aten.amin, aten.var, aten.std, aten.logsumexp, aten.norm, aten.argmax)
def reduction(node: fx.Node, dims: Dims) -> Passage | None:
    given: Any = node.args[0]
    schema = [argument.name for argument in node.target._schema.arguments]
    if "dim" not in schema or schema.index("dim") != 1 or len(node.args) < 2 or node.args[1] is None:
        return None
    rank = rank_of(given)
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
    return of_one(node, inner, lambda source, x: node.target(x, places, *more, **node.kwargs))
