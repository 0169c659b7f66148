"""Activation checkpointing that the model does itself: its marks become choices like any other, and are taken off.

So what is marked is computed again once, with the masks that were drawn in the forward, and never a second time because
a plan wants it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ort_accel.recompute.joint_graph import can_be_repeated, forward_nodes, inputs_of, is_lasting, owner, whole

MARK, REGION = "recompute", "ac_graph_id"
AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class Marks:
    """What `torch.utils.checkpoint` asked for."""

    again: set[fx.Node]
    """Operators that are computed again."""
    borders: set[fx.Node]
    """Operators whose results a region begins with: they are kept, whatever else is chosen."""


def mark(node: fx.Node, region: int) -> None:
    """Say of an operator that the backward is to compute it again. Regions that come later have larger numbers."""
    node.meta[MARK], node.meta[REGION] = CheckpointPolicy.PREFER_RECOMPUTE, region


def take_marks(joint: fx.Graph) -> Marks:
    """The marks of a joint graph, which is without them afterwards."""
    marked = [node for node in forward_nodes(joint) if node.meta.get(MARK) in AGAIN]
    again = {whole(node) for node in marked if can_be_repeated(whole(node)) and not _reads_changed(whole(node))}
    for node in marked:
        region = node.meta.get(REGION, 0)
        if any(user.meta.get(MARK) in AGAIN and user.meta.get(REGION, 0) > region for user in node.users):
            again.discard(whole(node))
    borders = {whole(owner(item)) for node in again for item in inputs_of(node)} - again
    for node in joint.nodes:
        node.meta.pop(MARK, None)
    return Marks(again, borders)


def _reads_changed(node: fx.Node) -> bool:
    return any(owner(item).op == "placeholder" and not is_lasting(item) for item in inputs_of(node))
