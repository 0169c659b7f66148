"""Attention: which keys a query looks at, so that the rest need not be computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ort_accel.graph.requires_grad import has_gradient
from ort_accel.graph.symbolic_sizes import Size, expression
from ort_accel.row_skipping.row_flow import Dims, value_of
from ort_accel.row_skipping.row_sets import Demand, Everything, Keys, Some, lift

aten = torch.ops.aten


class Operand(NamedTuple):
    """Queries, keys or values where written attention reads them."""

    reader: fx.Node
    node: fx.Node
    dims: Dims
    """Where the rows lie: [batch, heads, length, width], or the last two in the other order."""
    is_query: bool


class Hiding(NamedTuple):
    """An operator that may hide some of the scores."""

    step: fx.Node
    at: int
    """Which of its arguments the scores are."""

    @property
    def beside(self) -> list[Any]:
        """Its other arguments: layers with the same hide the same."""
        return [item for position, item in enumerate(self.step.args) if position != self.at]


@dataclass(frozen=True)
class Attention:
    """A `scaled_dot_product_attention` on [batch, heads, length, width], or the end of one that a model writes out."""

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    dropout: float
    is_causal: bool
    scale: Any
    operands: tuple[Operand, ...] = ()
    """Where it is written out, all that it reads of queries, keys and values; the three above are some of these."""
    hidden_by: tuple[Hiding, ...] = ()
    """Where it is written out, what may hide some of the scores."""

    @property
    def can_run_by_sequence(self) -> bool:
        """Whether each sequence can be computed on its own, with nothing but what it needs."""
        if self.operands:
            return False
        is_plain = value_of(self.query).shape[1] == value_of(self.key).shape[1]
        needs_gradient = self.mask is not None and has_gradient(self.mask)
        return is_plain and not needs_gradient

    def demand(self, of_result: Demand) -> Some | None:
        """The rows of the queries; None where all are needed."""
        if isinstance(of_result, Everything) or not set(of_result.dims) <= {0, 2}:
            return None
        shape = value_of(self.query).shape
        lifted = lift(of_result, (0, 2), (expression(shape[0]), expression(shape[2])))
        return lifted if isinstance(lifted, Some) else None

    def reads(self, queries: Some) -> list[tuple[fx.Node, Some]]:
        """What is read of queries, keys and values, for these rows of the queries."""
        keys = Some((0, 2), frozenset([Keys(self.node)]))
        if not self.operands:
            return [(self.query, queries), (self.key, keys), (self.value, keys)]
        return [(item.node, Some(item.dims, (queries if item.is_query else keys).atoms)) for item in self.operands]

    @property
    def key_length(self) -> Size:
        """How many keys there are in a sequence."""
        return value_of(self.value).shape[2]


def attention_in(node: fx.Node) -> Attention | None:
    """The attention that a node is, if it is one."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    parts = [given["query"], given["key"], given["value"]]
    if any(value_of(item).ndim != 4 for item in parts):
        return None
    if expression(value_of(parts[0]).shape[0]) != expression(value_of(parts[1]).shape[0]):
        return None
    mask = given.get("attn_mask")
    if mask is not None and value_of(mask).ndim != 4:
        return None
    causal, dropout = given.get("is_causal", False), given.get("dropout_p", 0.0)
    query, key, value = parts
    return Attention(node, query, key, value, mask, dropout, causal, given.get("scale"))


def flat_heads(dense: Tensor) -> Tensor:
    """[batch, heads, length, width] as rows of [heads, width]."""
    return dense.transpose(1, 2).flatten(0, 1)
