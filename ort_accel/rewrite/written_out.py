"""Attention that a model writes out: products of queries and keys, a mask, a softmax, and a product with the values.

Models do so where they are told to (`attn_implementation="eager"`), where they do more to the scores than a fused
kernel knows, and where they are older than it. Scores and weights are computed as the model says, for all pairs. But a
key that the mask hides has a weight of exactly zero, so that what leads to hidden keys and to queries that do not count
need not be computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ort_accel.lowering.sizes import known_equal, same_shape
from ort_accel.rewrite.padding import Attention
from ort_accel.rewrite.passages import shape_of, value_of

aten = torch.ops.aten

KEEPS_HIDDEN = {"to", "contiguous", "clone"}
"""Of what is done to scores, what leaves a hidden one hidden."""

ON_SCORES = KEEPS_HIDDEN | {"add", "sub", "mul", "div", "tanh", "masked_fill", "where"}
ON_WEIGHTS = KEEPS_HIDDEN | {"mul", "div", "dropout", "type_as"}
"""Of what is done to weights, what leaves a zero zero."""

HIDES = {"add", "masked_fill", "where"}


class _Scores(NamedTuple):
    product: fx.Node
    """Of queries and keys."""
    hidden_by: tuple[fx.Node, ...]
    """What may hide some of them, behind which nothing shows them again."""


def written_out(node: fx.Node) -> Attention | None:
    """The attention whose result a product is, if it is one's, on [batch, heads, length, width]."""
    if not _is_product(node):
        return None
    value: Any = node.args[1]
    scores = _scores_behind(node)
    if scores is None:
        return None
    query: Any
    key: Any
    query, key = scores.product.args
    shapes = [value_of(item).shape for item in (query, key, value)]
    heads_fit = same_shape(shapes[0][:2], shapes[1][:2]) and same_shape(shapes[0][:2], shapes[2][:2])
    if not heads_fit or not known_equal(shapes[1][3], shapes[2][2]) or key is value:
        return None
    return Attention(node, query, key, value, None, 0.0, False, None, *scores)


def _is_product(node: fx.Node) -> bool:
    return node.target is aten.matmul.default and all(value_of(item).ndim == 4 for item in node.all_input_nodes)


def _scores_behind(product: fx.Node) -> _Scores | None:
    """What the weights of a product were made from, through operators that keep each where it is."""
    sizes = value_of(product.args[0]).shape
    reader, current = product, product.args[0]
    is_after_softmax, stays_hidden = True, True
    hidden_by: list[fx.Node] = []
    while isinstance(current, fx.Node) and set(current.users) == {reader}:
        if (now := shape_of(current)) is None or not same_shape(now, sizes):
            return None
        if _is_product(current):
            return None if is_after_softmax else _Scores(current, tuple(hidden_by))
        name = _name(current)
        if name == "softmax":
            if not is_after_softmax or current.args[1] not in (-1, 3):
                return None
            is_after_softmax = False
        elif name not in (ON_WEIGHTS if is_after_softmax else ON_SCORES) or _is_reversed(current):
            return None
        elif not is_after_softmax:
            stays_hidden &= name in HIDES | KEEPS_HIDDEN
            if stays_hidden and name in HIDES:
                hidden_by.append(current)
        reader, current = current, current.args[on_chain(current)]
    return None


def _is_reversed(node: fx.Node) -> bool:
    """Whether scores are taken away or divided by, which makes much of what is small."""
    return "alpha" in node.kwargs or (_name(node) == "div" and on_chain(node) == 1)


def on_chain(node: fx.Node) -> int:
    """Which argument of an operator on scores the scores are."""
    if _name(node) == "where":
        return 1
    sizes = shape_of(node.args[0])
    is_first = sizes is not None and same_shape(sizes, value_of(node).shape)
    return 0 if is_first or len(node.args) < 2 else 1


def _name(node: fx.Node) -> str:
    """The operator without its form; in place or not."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet).removeprefix("aten.").removeprefix("_").rstrip("_") if packet else ""
