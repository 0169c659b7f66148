"""The floating point operations of a node, at the sizes that the graph was captured with."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_accel.graph.symbolic_sizes import hint, is_known
from ort_accel.operators.facts import facts


def flops(node: fx.Node) -> int:
    """Return the estimated operations of a node; 0 for operators whose time is not spent computing."""
    formula = facts(node).flops
    if formula is None:
        return 0
    arguments = fx.map_arg(node.args, lambda argument: _shapes(argument.meta.get("val")))
    return formula(*arguments, result=_shapes(node.meta.get("val")))


def _shapes(value: Any) -> Any:
    """Return the sizes of a tensor, or of each in a list; a size that depends on data counts 0."""
    if isinstance(value, torch.Tensor):
        return tuple(hint(size) if is_known(size) else 0 for size in value.shape)
    return tuple(map(_shapes, value)) if isinstance(value, tuple | list) else value
