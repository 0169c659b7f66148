"""Attention that a model writes out: products of queries and keys, a mask, a softmax, and a product with the values.

Models do so where they are told to (`attn_implementation="eager"`), where they do more to the scores than a fused
kernel knows, and where they are older than it. Scores and weights are computed as the model says, for all pairs. But a
key that the mask hides has a weight of exactly zero, so that what leads to hidden keys and to queries that do not count
need not be computed. Beside the scores of the keys there may be one of none, a "sink", as in GPT-OSS.

Each score may be made of several parts, of which some are made from the query alone, and some from the key: products
with embeddings of their distance, say. Batch and heads may be one dimension from the products on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from ort_accel.graph.nodes import is_part, is_view, order_of
from ort_accel.graph.symbolic_sizes import known_equal, same_shape
from ort_accel.row_skipping.attention_padding import Attention, Hiding, Operand
from ort_accel.row_skipping.layout_rules import groups
from ort_accel.row_skipping.row_flow import held_in_full, rank_of, shape_of, value_of

aten = torch.ops.aten

KEEPS_HIDDEN = {"to", "contiguous", "clone"}
"""Of what is done to scores, what leaves a hidden one hidden."""

OTHER_FORM = {"view", "reshape", "unsafe_view"}
HIDES = {"add", "masked_fill", "where"}

ON_SCORES = KEEPS_HIDDEN | HIDES | {"sub", "mul", "div", "tanh"}
"""What makes each score of those that stand in its place, with a gradient even where these are zero."""

ON_WEIGHTS = KEEPS_HIDDEN | OTHER_FORM | {"mul", "div", "dropout", "type_as"}
"""Of what is done to weights, what leaves a zero zero."""

LARGEST = {aten.max.dim, aten.amax.default}

PRODUCTS = {aten.matmul.default, aten.bmm.default}


class _Places(NamedTuple):
    """Along which dimensions of a value the queries and the keys lie."""

    query: int | None
    key: int | None


class _Step(NamedTuple):
    """That an operator reads a value as one with queries or keys."""

    reader: fx.Node
    node: fx.Node
    places: _Places


class _Found(NamedTuple):
    """What a value is made from, if it has queries or keys."""

    operands: frozenset[Operand]
    steps: frozenset[_Step]


def written_out(node: fx.Node) -> Attention | None:
    """The attention whose result this is, if it is one's, on [batch, heads, length, width]."""
    product = _product_of(node)
    behind = _softmax_behind(product) if product else None
    if product is None or behind is None:
        return None
    softmax, given, end = behind
    rank = rank_of(softmax)
    scores = _trace(given, end, _Places(rank - 2, rank - 1))
    values = _trace(product.args[1], product, _Places(None, rank_of(product) - 2))
    if scores is None or values is None or len(values.operands) > 1:
        return None
    (value,) = values.operands
    operands = [*sorted(scores.operands, key=lambda item: item.node.name), value]
    queries = [item for item in operands if item.is_query and item.dims == (0, 2)]
    keys = [item for item in operands[:-1] if not item.is_query]
    if not queries or not keys or not _fit(queries[0], value, operands):
        return None
    if not _is_read_inside(scores, end) or not _is_read_inside(values, product):
        return None
    if any(not _has_heads_of(item, queries[0].node) for item in (node, softmax, *(step.node for step in scores.steps))):
        return None
    hides = tuple(_hiding(given, scores))
    parts = queries[0].node, keys[0].node, value.node
    return Attention(node, *parts, None, 0.0, False, None, tuple(operands), hides)


def _product_of(node: fx.Node) -> fx.Node | None:
    """The product that makes a value of [batch, heads, length, width], maybe with the first two as one."""
    if _is_product(node, 4):
        return node
    given: Any = node.args[0] if _name(node) in OTHER_FORM else None
    is_one = isinstance(given, fx.Node) and _is_product(given, 3) and set(given.users) == {node}
    return given if is_one and rank_of(node) == 4 and _moved(node, (1, 2)) == (2, 3) else None


def _is_product(node: fx.Node, rank: int) -> bool:
    return node.target in PRODUCTS and all(rank_of(item) == rank for item in node.all_input_nodes)


class _Behind(NamedTuple):
    """What gives weights."""

    softmax: fx.Node
    scores: Any
    end: fx.Node
    """What reads the scores."""


def _softmax_behind(product: fx.Node) -> _Behind | None:
    """The softmax over keys that gives the weights of a product, through operators that keep each where it is."""
    reader, current = product, product.args[0]
    kept: fx.Node | None = None
    while isinstance(current, fx.Node) and set(current.users) == {reader}:
        rank = rank_of(current)
        name = _name(current)
        if name == "softmax" and current.args[1] in (-1, rank - 1):
            return _beside_a_sink(current, kept) if kept is not None else _Behind(current, current.args[0], current)
        if name == "slice" and kept is None and _is_first_part(current):
            reader = kept = current
            current = current.args[0]
            continue
        if name not in ON_WEIGHTS:
            return None
        at = _whole_operand(current) if name not in OTHER_FORM else 0
        if name in OTHER_FORM:
            before = rank_of(current.args[0])
            if _moved(current, (before - 2, before - 1)) != (rank - 2, rank - 1):
                return None
        elif at is None or (name == "div" and at == 1):
            return None
        reader, current = current, current.args[at or 0]
    return None


def _is_first_part(node: fx.Node) -> bool:
    """Whether a slice takes the first ones along the last dimension."""
    given: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, _, step = given
    return dim in (-1, rank_of(node) - 1) and start in (0, None) and step == 1


def _beside_a_sink(softmax: fx.Node, kept: fx.Node) -> _Behind | None:
    """The scores that have a learned one beside them, which no key has: it takes weight, and is dropped with it.

    The largest of each row may be subtracted before, for the sake of what a type can hold.
    """
    joined: Any = softmax.args[0]
    inside = {softmax}
    if _name(joined) == "sub" and set(joined.users) == inside:
        whole, largest = joined.args[:2]
        peak: Any = largest.args[0] if is_part(largest) and largest.args[1] == 0 else largest
        if peak.target not in LARGEST or peak.args[0] is not whole or joined.kwargs:
            return None
        if peak.args[1] not in (-1, [-1], rank_of(whole) - 1, [rank_of(whole) - 1]):
            return None
        joined, inside = whole, {joined, peak}
    if _name(joined) != "cat" or set(joined.users) != inside or len(joined.args) != 2 or len(joined.args[0]) != 2:
        return None
    (scores, sink), dim = joined.args
    is_along = dim in (-1, rank_of(joined) - 1) and known_equal(value_of(scores).shape[-1], value_of(kept).shape[-1])
    return _Behind(softmax, scores, joined) if is_along and _is_learned(sink) else None


def _is_learned(node: Any) -> bool:
    """Whether a value is nothing but an input in another form."""
    while isinstance(node, fx.Node) and node.op == "call_function" and is_view(node):
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op in {"placeholder", "get_attr"}


def _whole_operand(node: fx.Node) -> int | None:
    """The first argument that is of the result's shape."""
    wanted = value_of(node).shape
    for at, item in enumerate(node.args):
        if (shape := shape_of(item)) is not None and same_shape(shape, wanted):
            return at
    return None


# From scores to what they are made of


def _trace(node: Any, reader: fx.Node, places: _Places) -> _Found | None:
    """What queries and keys of a value are made from; None where it has none, or mixes them."""
    if not isinstance(node, fx.Node) or places == _Places(None, None):
        return None
    if _is_operand(node, reader, places):
        dim = places.key if places.query is None else places.query
        assert dim is not None
        operand = Operand(reader, node, (0, dim), is_query=places.key is None)
        return _Found(frozenset([operand]), frozenset())
    parts = [found for item, at in _parts(node, places) if (found := _trace(item, node, at))]
    if not parts:
        return None
    operands = frozenset[Operand]().union(*(part.operands for part in parts))
    steps = frozenset([_Step(reader, node, places)]).union(*(part.steps for part in parts))
    return _Found(operands, steps)


def _is_operand(node: fx.Node, reader: fx.Node, places: _Places) -> bool:
    """Whether a value is [batch, heads, length, width], or with the last two in the other order."""
    joins = reader.target in PRODUCTS or (_name(reader) in OTHER_FORM and rank_of(reader) == 3)
    return joins and None in places and rank_of(node) == 4 and not {2, 3}.isdisjoint(places)


def _parts(node: fx.Node, places: _Places) -> list[tuple[Any, _Places]]:
    """The arguments that a value's queries and keys come from, and where these lie in them."""
    name, args = _name(node), node.args
    rank = rank_of(node) if isinstance(node.meta.get("val"), torch.Tensor) else 0
    if name in ON_SCORES and not (name == "div" and args[0] is args[1]):
        given = args[1:3] if name == "where" else args[:2] if name in {"add", "sub", "mul"} else args[:1]
        return [(item, _held(item, node, places)) for item in given if shape_of(item) is not None]
    if node.target in PRODUCTS:
        return _factors(args[0], args[1], rank, places)
    if name == "baddbmm":
        return [(args[0], _held(args[0], node, places)), *_factors(args[1], args[2], rank, places)]
    if name == "gather":
        along: Any = args[1]
        is_inside = along % rank >= rank - 2
        return [(args[0], _Places(*(None if at == along % rank else at for at in places)))] if is_inside else []
    if name in {"transpose", "permute", "t"}:
        order = order_of(node)
        return [(args[0], _Places(*(None if at is None else order[at] for at in places)))]
    if name in OTHER_FORM:
        before = _moved(node, tuple(at for at in places if at is not None), back=True)
        if before is not None:
            left = iter(before)
            return [(args[0], _Places(*(None if at is None else next(left) for at in places)))]
    return []


def _factors(one: Any, other: Any, rank: int, places: _Places) -> list[tuple[Any, _Places]]:
    """The factors of a product, of which the one gives the rows and the other the columns of each result."""
    if any(at is not None and at < rank - 2 for at in places):
        return []
    rows = _Places(*(at if at == rank - 2 else None for at in places))
    columns = _Places(*(at if at == rank - 1 else None for at in places))
    return [(item, at) for item, at in ((one, rows), (other, columns)) if rank_of(item) == rank]


def _held(item: Any, node: fx.Node, places: _Places) -> _Places:
    """Where an operand of an element-wise operator has what the result has in these places."""
    lacks = rank_of(node) - rank_of(item)
    kept = held_in_full(value_of(item), value_of(node), tuple(at for at in places if at is not None))
    return _Places(*(at - lacks if at is not None and at in kept else None for at in places))


def _moved(node: fx.Node, dims: tuple[int, ...], *, back: bool = False) -> tuple[int, ...] | None:
    """Where these dimensions of a view's input lie in its result, or the other way, if they stay as they are."""
    before, after = value_of(node.args[0]).shape, value_of(node).shape
    pairs = [(old[0], new[0]) for old, new in groups(before, after) if len(old) == len(new) == 1]
    found = {new: old for old, new in pairs} if back else dict(pairs)
    return tuple(found[dim] for dim in dims) if set(dims) <= found.keys() else None


# What must hold


def _fit(query: Operand, value: Operand, operands: list[Operand]) -> bool:
    """Whether all have the same sequences and heads, queries and keys as many as each other, and each one form."""
    if value.dims != (0, 2):
        return False
    forms: dict[fx.Node, tuple[int, ...]] = {}
    for item in operands:
        shape, of = value_of(item.node).shape, value_of((query if item.is_query else value).node).shape
        if not same_shape(shape[:2], of[:2]) or not known_equal(shape[item.dims[1]], of[2]):
            return False
        if forms.setdefault(item.node, item.dims) != item.dims:
            return False
    return same_shape(value_of(query.node).shape[:2], value_of(value.node).shape[:2])


def _has_heads_of(node: fx.Node, query: fx.Node) -> bool:
    """Whether a value of four dimensions begins with the same sequences and heads."""
    return rank_of(node) != 4 or same_shape(value_of(node).shape[:2], value_of(query).shape[:2])


def _is_read_inside(found: _Found, end: fx.Node) -> bool:
    """Whether nothing else reads what lies between operands and the end, and nothing reads it in two ways."""
    read_by: dict[fx.Node, set[fx.Node]] = {}
    places: dict[fx.Node, _Places] = {}
    for step in found.steps:
        read_by.setdefault(step.node, set()).add(step.reader)
        if places.setdefault(step.node, step.places) != step.places:
            return False
    inside = {end, *read_by}
    return all(set(node.users) == readers and readers <= inside for node, readers in read_by.items())


def _hiding(scores: Any, found: _Found) -> Iterator[Hiding]:
    """What may hide some of the scores, behind which nothing shows them again, from the softmax on."""
    made = {step.node for step in found.steps}
    while scores in made:
        name = _name(scores)
        if name in HIDES and "alpha" not in scores.kwargs:
            of_scores = [at for at, item in enumerate(scores.args) if item in made]
            is_one = len(of_scores) == 1
            if not is_one and name != "add":
                return
            if is_one and rank_of(scores) == 4:
                yield Hiding(scores, of_scores[0])
            elif name != "add":
                return
            scores = scores.args[of_scores[0]]
        elif name in KEEPS_HIDDEN | OTHER_FORM:
            scores = scores.args[0]
        else:
            return


def _name(node: fx.Node) -> str:
    """The operator without its form; in place or not."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet).removeprefix("aten.").removeprefix("_").rstrip("_") if packet else ""
