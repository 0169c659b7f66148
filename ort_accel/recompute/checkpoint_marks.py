"""Activation checkpointing in the model: the marks of `torch.utils.checkpoint` become part of the recompute plan.

The marks are removed from the graph, so that PyTorch does not recompute the same operators again. Dropout masks of the
forward are saved rather than drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ort_accel.graph.meta_keys import CHECKPOINT_REGION, RECOMPUTE
from ort_accel.recompute.joint_graph import (
    forward_nodes,
    is_recomputable,
    is_unchanged_input,
    producer,
    storage_owner,
    tensor_inputs,
)

RECOMPUTE_POLICIES = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class Marks:
    """Operators that `torch.utils.checkpoint` speaks of."""

    recomputed: set[fx.Node]
    region_inputs: set[fx.Node]
    """Operators whose results a region reads. They are saved under every plan."""


def mark_recompute(node: fx.Node, region: int) -> None:
    """Mark an operator for recompute. Later regions have larger numbers."""
    node.meta[RECOMPUTE], node.meta[CHECKPOINT_REGION] = CheckpointPolicy.PREFER_RECOMPUTE, region


def take_marks(joint: fx.Graph) -> Marks:
    """Remove the marks from a joint graph and return them."""
    marked = [node for node in forward_nodes(joint) if _is_marked(node)]
    recomputed = {producer(node) for node in marked if _is_allowed(producer(node))}
    for node in marked:
        region = node.meta.get(CHECKPOINT_REGION, 0)
        if any(_is_marked(user) and user.meta.get(CHECKPOINT_REGION, 0) > region for user in node.users):
            recomputed.discard(producer(node))
    read = {producer(storage_owner(item)) for node in recomputed for item in tensor_inputs(node)}
    for node in joint.nodes:
        node.meta.pop(RECOMPUTE, None)
    return Marks(recomputed, read - recomputed)


def _is_marked(node: fx.Node) -> bool:
    return node.meta.get(RECOMPUTE) in RECOMPUTE_POLICIES


def _is_allowed(node: fx.Node) -> bool:
    """True if an operator can be recomputed and reads no input that the forward writes to."""
    inputs = (item for item in tensor_inputs(node) if storage_owner(item).op == "placeholder")
    return is_recomputable(node) and all(map(is_unchanged_input, inputs))
