"""Writes values to where a mask holds as a choice between two tensors: `x[mask] = value` as `where(mask, value, x)`.

Autograd would look up how many positions the mask has to sum the gradient of `value`, which no graph knows before it
runs, so that Dynamo would divide the graph there. Wav2Vec2's masked time steps are written so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx


def write_by_mask(module: fx.GraphModule) -> None:
    """Replace, in a graph that Dynamo captured, each assignment whose value is the same for every chosen position."""
    found = [node for node in module.graph.nodes if node.target is operator.setitem and _is_uniform(*node.args)]
    for node in found:
        node.target = assign_where
    if found:
        module.recompile()


def assign_where(into: Tensor, mask: Tensor, value: Any) -> None:
    """Do what `into[mask] = value` does, for a value that does not depend on the position in the mask."""
    chosen = mask[(..., *[None] * (into.ndim - mask.ndim))]
    into.copy_(torch.where(chosen, value, into))


def _is_uniform(into: fx.node.Argument, mask: fx.node.Argument, value: fx.node.Argument) -> bool:
    whole, where, what = map(_example, (into, mask, value))
    if not isinstance(whole, Tensor) or not isinstance(where, Tensor) or where.dtype != torch.bool or where.ndim == 0:
        return False
    if isinstance(what, Tensor):
        return what.ndim <= whole.ndim - where.ndim and what.dtype == whole.dtype
    return isinstance(what, bool | int | float)


def _example(argument: fx.node.Argument) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument
