"""Looks up the rule of an operator that works row by row.

Each family of operators has one rule function. It takes a node and the dimensions of the result along which rows lie.
It returns a `Propagation`, or None if the operator mixes rows. Packed rows lie along the first dimension; the other
dimensions follow in their order.
"""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.row_skipping import arithmetic_rules, layout_rules
from ort_accel.row_skipping.row_flow import Dims, Propagation

RULES = arithmetic_rules.RULES | layout_rules.RULES


def propagate(node: fx.Node, dims: Dims) -> Propagation | None:
    """Returns how a node computes these rows; None if it mixes rows or has no rule."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    rule = RULES.get(target.overloadpacket)
    if rule is None and torch.Tag.pointwise in target.tags:
        rule = arithmetic_rules.elementwise
    return rule(node, dims) if rule else None
