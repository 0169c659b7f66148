"""Matches losses over classes, which read only the scores whose label is not ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ort_accel.row_skipping.row_flow import call_operator, value_of
from ort_accel.row_skipping.row_sets import SomeRows, ValidLabel

aten = torch.ops.aten

LOSSES = {aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd, aten.nll_loss2d}


@dataclass(frozen=True)
class Loss:
    """A loss over classes whose labels may be ignored."""

    node: fx.Node
    scores: fx.Node
    target: fx.Node
    reduction: int
    ignore_index: int

    @property
    def score_rows(self) -> SomeRows:
        """The rows that are read of the scores: classes lie along dimension 1, rows along the others."""
        rank = value_of(self.scores).ndim
        return SomeRows((0, *range(2, rank)), frozenset([ValidLabel(self.target, self.ignore_index)]))

    def of_rows(self, scores: Tensor, target: Tensor, dense: Callable[[Argument], Any]) -> Tensor:
        """Returns the loss of packed rows; without reduction, one number for each row."""
        arguments = [scores, target, *map(dense, self.node.args[2:])]
        named = {name: dense(item) for name, item in self.node.kwargs.items()}
        if self.node.target is aten.nll_loss2d.default:
            return cast("Tensor", aten.nll_loss.default(*arguments, **named))
        return cast("Tensor", call_operator(self.node, *arguments, **named))


def match_loss(node: fx.Node) -> Loss | None:
    """Returns the loss that a node computes; None for other nodes, and for labels that are probabilities."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket not in LOSSES:
        return None
    given: dict[str, Any] = {item.name: item.default_value for item in node.target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    scores, target = given["self"], given["target"]
    rank, labels, ignored = value_of(scores).ndim, value_of(target), given["ignore_index"]
    if rank < 2 or labels.ndim != rank - 1 or labels.is_floating_point() or not isinstance(ignored, int):
        return None
    return Loss(node, scores, target, given["reduction"], ignored)
