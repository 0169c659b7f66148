"""Decides who runs each node, and cuts the graph into segments. This file holds the order; others hold the decisions.

ONNX Runtime runs every node that no decision gives to PyTorch. A later decision never takes a node back from PyTorch.

1. Rules for single nodes (`assign.py`), in this order: numbers that depend on data; the user's wishes and random draws;
   operators, dtypes and devices without a lowering; the list of slow operators; a trial model of the node alone.
2. The estimate of the whole graph by the speed of this machine (`autotune/cost_model.py`), or instead of it
3. the tuner (`autotune/tuner.py`), which times kinds of nodes, and then whole graphs.
4. Segments too small for a handover (`merge_small_segments.py`), once the graph is cut.

The price of a handover has one source, `autotune/handover_cost.py`, and all times come from `autotune/timer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import fx

from ort_accel.graph.nodes import is_part, is_random, is_size, is_watched
from ort_accel.partition.assign import Assignment, Refusal
from ort_accel.partition.delay_large_values import delay_large_values
from ort_accel.partition.merge_small_segments import merge_small_segments
from ort_accel.partition.segments import Cut, cut
from ort_accel.partition.split_at_gradients import Gradients, split_at_gradients
from ort_accel.reporting import Runner

Decision = Callable[[Assignment], Mapping[fx.Node, Refusal]]
"""Returns the nodes that PyTorch runs from now on, each with the reason."""


def place(graph: fx.Graph, decisions: Iterable[Decision]) -> Assignment:
    """Assigns the nodes whose results are read. Sizes are not among them: they are computed outside segments."""
    assignment = Assignment(dict.fromkeys(_needed(graph), Runner.ORT))
    for decide in decisions:
        assignment = assignment.with_refusals(decide(assignment))
    return assignment


def by_rule(rule: Callable[[fx.Node], Refusal | None]) -> Decision:
    """Returns the decision that asks a rule about each node."""

    def decide(assignment: Assignment) -> Mapping[fx.Node, Refusal]:
        ours = (node for node, runner in assignment.runner.items() if runner is Runner.ORT)
        return {node: refusal for node in ours if (refusal := rule(node))}

    return decide


def segments(
    graph: fx.Graph, assignment: Assignment, merges_small: bool, gradients: Gradients = ()
) -> tuple[Assignment, list[Cut]]:
    """Cuts a graph. Returns the segments, and the assignment that also says which nodes small segments gave up."""
    cuts = cut(graph, assignment)
    if merges_small:
        cuts, given_up = merge_small_segments(cuts)
        assignment = assignment.with_refusals(given_up)
    cuts = delay_large_values(cuts, assignment.free)
    return assignment, split_at_gradients(cuts, graph, assignment.free, gradients) if gradients else cuts


def _needed(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes that are computed for the outputs, or do more than give a result."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read = not needed.isdisjoint(node.users)
        if not is_size(node) and (is_read or node.is_impure() or is_random(node) or is_watched(node)):
            needed.add(node)
    return [node for node in graph.nodes if node in needed and node.op == "call_function" and not is_part(node)]
