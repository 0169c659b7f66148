"""Losses over classes: only rows whose label is not ignored are read of the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.row_skipping.row_flow import value_of
from ort_accel.row_skipping.row_sets import Labelled, Some

aten = torch.ops.aten

LOSSES = {aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd, aten.nll_loss2d}


@dataclass(frozen=True)
class Loss:
    """A loss over classes, with labels of which some may be ignored."""

    node: fx.Node
    scores: fx.Node
    target: fx.Node
    reduction: int
    ignore_index: int

    @property
    def demand(self) -> Some:
        """What is read of the scores: classes lie along the second dimension, rows along the others."""
        rank = value_of(self.scores).ndim
        atom = Labelled(self.target, self.ignore_index)
        return Some((0, *range(2, rank)), frozenset([atom]))

    def of_rows(self, scores: Tensor, target: Tensor, dense: Any) -> Tensor:
        """The loss of some rows; a loss of each row stays one number for each."""
        arguments = [scores, target, *map(dense, self.node.args[2:])]
        given = {name: dense(item) for name, item in self.node.kwargs.items()}
        if self.node.target in {aten.nll_loss2d.default}:
            return aten.nll_loss.default(*arguments, **given)
        return self.node.target(*arguments, **given)


def loss_in(node: fx.Node) -> Loss | None:
    """The loss that a node is; None where it is no such loss, or where its labels are probabilities."""
    if getattr(node.target, "overloadpacket", None) not in LOSSES:
        return None
    given = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    scores, target = given["self"], given["target"]
    rank, labels, ignored = value_of(scores).ndim, value_of(target), given["ignore_index"]
    if rank < 2 or labels.ndim != rank - 1 or labels.is_floating_point() or not isinstance(ignored, int):
        return None
    return Loss(node, scores, target, given["reduction"], ignored)
