"""Replaces `x[mask] = value` by `x.copy_(where(mask, value, x))` if the value is the same for every masked position.

Autograd computes the value's gradient from the number of masked positions, which is unknown at capture. Dynamo would
break the graph there. Wav2Vec2 writes its masked time steps this way.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ort_accel.passes.common import example_of, recompile
from ort_accel.passes.options import PassOptions


def replace_masked_writes(graph: fx.Graph, _: PassOptions) -> int:
    """Replace such assignments in a graph that Dynamo captured; returns how many."""
    found = [node for node in graph.nodes if node.target is operator.setitem and _is_uniform(*node.args)]
    for node in found:
        node.target = assign_where
    if found:
        recompile(graph)
    return len(found)


def assign_where(target: Tensor, mask: Tensor, value: Tensor | float) -> None:
    """Do `target[mask] = value` for a value that is the same for every masked position."""
    expanded = mask[(..., *[None] * (target.ndim - mask.ndim))]
    target.copy_(torch.where(expanded, value, target))


def _is_uniform(target: Argument, mask: Argument, value: Argument) -> bool:
    written, chosen, example = map(_example, (target, mask, value))
    if not isinstance(written, Tensor) or not isinstance(chosen, Tensor):
        return False
    if chosen.dtype != torch.bool or chosen.ndim == 0:
        return False
    if isinstance(example, Tensor):
        return example.ndim <= written.ndim - chosen.ndim and example.dtype == written.dtype
    return isinstance(example, bool | int | float)


def _example(argument: Argument) -> object:
    return example_of(argument) if isinstance(argument, fx.Node) else argument
