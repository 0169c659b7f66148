"""Operators that work row by row: from which rows of its inputs each row of a result is made, and how to make it.

For every family of operators there is one function. It takes a node and the dimensions of its result along which the
rows lie, and returns a `Passage`, or None if the operator mixes rows. In the packed form of a value the rows stand in
the first dimension, and the other dimensions follow in their order.
"""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.row_skipping import arithmetic_rules, layout_rules
from ort_accel.row_skipping.row_flow import Dims, Passage

RULES = arithmetic_rules.RULES | layout_rules.RULES


def passage(node: fx.Node, dims: Dims) -> Passage | None:
    """How a node makes these rows; None where it mixes rows or is not known."""
    packet = getattr(node.target, "overloadpacket", None)
    rule = RULES.get(packet)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = arithmetic_rules.elementwise
    if rule is None or getattr(node.target, "_schema", None) is None or node.target._schema.is_mutable:
        return None
    return rule(node, dims)
