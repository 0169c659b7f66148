"""Matches attention, and tells which queries and keys it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ort_accel.graph.requires_grad import has_gradient
from ort_accel.graph.symbolic_sizes import Size, expression
from ort_accel.row_skipping.row_flow import Dims, argument_names, value_of
from ort_accel.row_skipping.row_sets import AttendedKeys, SomeRows, broadcast

aten = torch.ops.aten


class Operand(NamedTuple):
    """Queries, keys or values, as an operator of unfused attention reads them."""

    reader: fx.Node
    node: fx.Node
    dims: Dims
    """The order of the dimensions: [batch, heads, length, width], or the last two in the other order."""
    is_query: bool


class ScoreMask(NamedTuple):
    """An operator that may mask some of the scores."""

    node: fx.Node
    scores_position: int
    """The position of the scores among its arguments."""

    @property
    def other_arguments(self) -> list[Argument]:
        """Its arguments beside the scores; layers that share them mask the same scores."""
        return [item for position, item in enumerate(self.node.args) if position != self.scores_position]


@dataclass(frozen=True)
class Attention:
    """A `scaled_dot_product_attention` on [batch, heads, length, width], or the last node of an unfused one."""

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    dropout: float
    is_causal: bool
    scale: float | None
    operands: tuple[Operand, ...] = ()
    """Every read of queries, keys and values by unfused attention; empty for fused attention."""
    score_masks: tuple[ScoreMask, ...] = ()
    """The operators of unfused attention that may mask scores."""

    @property
    def can_run_varlen(self) -> bool:
        """True if it can run as varlen attention, on packed queries and keys."""
        if self.operands:
            return False
        has_equal_heads = value_of(self.query).shape[1] == value_of(self.key).shape[1]
        return has_equal_heads and not (self.mask is not None and has_gradient(self.mask))

    def query_rows(self, result_rows: SomeRows) -> SomeRows | None:
        """Returns the rows that are needed of the queries; None where all are."""
        if not set(result_rows.dims) <= {0, 2}:
            return None
        shape = value_of(self.query).shape
        rows = broadcast(result_rows, (0, 2), (expression(shape[0]), expression(shape[2])))
        return rows if isinstance(rows, SomeRows) else None

    def operand_rows(self, queries: SomeRows) -> list[tuple[fx.Node, SomeRows]]:
        """Returns the rows that these queries read of queries, keys and values."""
        keys = SomeRows((0, 2), frozenset([AttendedKeys(self.node)]))
        if not self.operands:
            return [(self.query, queries), (self.key, keys), (self.value, keys)]
        return [(item.node, SomeRows(item.dims, (queries if item.is_query else keys).atoms)) for item in self.operands]

    @property
    def key_length(self) -> Size:
        """The number of keys in a sequence."""
        return value_of(self.value).shape[2]


def match_fused_attention(node: fx.Node) -> Attention | None:
    """Returns the attention that a `scaled_dot_product_attention` node computes."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    given: dict[str, Any] = dict(zip(argument_names(node), node.args, strict=False)) | node.kwargs
    query, key, value = given["query"], given["key"], given["value"]
    mask: fx.Node | None = given.get("attn_mask")
    if any(value_of(item).ndim != 4 for item in (query, key, value)):
        return None
    if expression(value_of(query).shape[0]) != expression(value_of(key).shape[0]):
        return None
    if mask is not None and value_of(mask).ndim != 4:
        return None
    causal, dropout = given.get("is_causal", False), given.get("dropout_p", 0.0)
    return Attention(node, query, key, value, mask, dropout, causal, given.get("scale"))


def flat_heads(dense: Tensor) -> Tensor:
    """Reshapes [batch, heads, length, width] to rows of [heads, width]."""
    return dense.transpose(1, 2).flatten(0, 1)
