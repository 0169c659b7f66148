"""Dividing the joint graph into a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from functorch.compile import default_partition
from torch import fx

from ort_accel.graph.meta_keys import OUTLIVES_GRAPH
from ort_accel.graph.nodes import is_random
from ort_accel.recompute.insert_recompute import compute_again
from ort_accel.recompute.joint_graph import is_lasting
from ort_accel.recompute.pack_masks import keep_bits

Pair = tuple[fx.GraphModule, fx.GraphModule]
"""A forward graph and its backward graph."""


def partition(
    joint: fx.GraphModule, inputs: Any, chosen: Collection[fx.Node] = (), as_bits: bool = False, **how: Any
) -> Pair:
    """Keep for the backward what it reads: all that eager mode keeps, less the views and the chosen operators; and of
    masks their bits alone, if that is wanted."""
    for node in joint.graph.find_nodes(op="placeholder"):
        if is_lasting(node):
            node.meta[OUTLIVES_GRAPH] = True
    compute_again(joint.graph, chosen)
    if as_bits:
        keep_bits(joint.graph, how["num_fwd_outputs"])
    forward, backward = default_partition(joint, inputs, **how)
    backward.graph.eliminate_dead_code(_is_needed)
    return forward, backward


def _is_needed(node: fx.Node) -> bool:
    """Whether a node of a backward does more than to give its result. What is drawn for nobody, the forward draws."""
    return node.is_impure() and not is_random(node)


def rehearsed(
    joint: fx.GraphModule, inputs: Any, chosen: Collection[fx.Node] = (), as_bits: bool = False, **how: Any
) -> Pair:
    """What `partition` would give, with the joint graph left as it is."""
    graph, twins = fx.Graph(), {}  # type: tuple[fx.Graph, dict[fx.Node, fx.Node]]
    graph.output(graph.graph_copy(joint.graph, twins)).meta = dict(joint.graph.output_node().meta)
    return partition(fx.GraphModule(joint, graph), inputs, [twins[node] for node in chosen], as_bits, **how)
