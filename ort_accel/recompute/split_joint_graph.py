"""Splitting a joint graph into a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from functorch.compile import default_partition
from torch import fx

from ort_accel.graph.meta_keys import OUTLIVES_GRAPH
from ort_accel.graph.nodes import is_random
from ort_accel.recompute.insert_recompute import insert_recompute
from ort_accel.recompute.joint_graph import is_unchanged_input
from ort_accel.recompute.pack_masks import pack_masks

GraphPair = tuple[fx.GraphModule, fx.GraphModule]
"""A forward graph and its backward graph."""


def split_joint_graph(
    joint: fx.GraphModule,
    inputs: Sequence[object],
    recomputed: Collection[fx.Node] = (),
    packs_masks: bool = False,
    *,
    num_fwd_outputs: int,
    **options: object,
) -> GraphPair:
    """Split a joint graph, which is changed. Views and the given operators are recomputed rather than saved."""
    for node in joint.graph.find_nodes(op="placeholder"):
        if is_unchanged_input(node):
            node.meta[OUTLIVES_GRAPH] = True
    insert_recompute(joint.graph, recomputed)
    if packs_masks:
        pack_masks(joint.graph, num_fwd_outputs)
    forward, backward = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
    backward.graph.eliminate_dead_code(_has_side_effect)
    return forward, backward


def _has_side_effect(node: fx.Node) -> bool:
    """True if a backward node does more than compute its result. The forward alone draws unread random numbers."""
    return node.is_impure() and not is_random(node)


def copy_joint_graph(joint: fx.GraphModule, nodes: Collection[fx.Node] = ()) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Returns a copy of a joint graph, and the copies of these nodes."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(joint.graph, copies)).meta = dict(joint.graph.output_node().meta)
    return fx.GraphModule(joint, graph), [copies[node] for node in nodes]
