"""Decides who runs each node, and cuts the graph into segments. This file has the order of the decisions.

ONNX Runtime runs every node that no decision gives to PyTorch. A later decision never takes a node back from PyTorch.

1. Rules for single nodes (`assign.py`): data-dependent values, the user's wishes, random draws, missing lowerings, the
   list of slow operators, a trial model of the node alone.
2. The estimator (`autotune/cost_model.py`) divides the whole graph by the speed of this machine.
3. The tuner (`autotune/tuner.py`), where it is on, times kinds of nodes and then whole graphs instead.
4. Segments too small for a handover go to PyTorch (`merge_small_segments`), once the graph is cut.

The price of a handover has one source, `autotune/handover_cost.py`, and all times come from `autotune/timer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx

from ort_accel.graph.nodes import fakes_in, is_getitem, is_random, is_size, is_watch_call, op_name
from ort_accel.graph.symbolic_sizes import hinted_elements
from ort_accel.partition.assign import Assignment, Refusal
from ort_accel.partition.delay_large_values import delay_large_values
from ort_accel.partition.known_slow_ops import MIN_HANDOVER_ELEMENTS
from ort_accel.partition.segments import Cut, cut
from ort_accel.partition.split_at_gradients import Gradients, split_at_gradients
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.segments import Runner

Decision = Callable[[Assignment], Mapping[fx.Node, Refusal]]
"""Returns the nodes that PyTorch runs from now on, each with the reason."""

HEAVY = ("mm", "bmm", "convolution")
"""Parts of the names of operators that are worth a handover at any size that training meets."""


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


def merge_small_segments(cuts: Sequence[Cut]) -> tuple[list[Cut], dict[fx.Node, Refusal]]:
    """Joins small segments of ONNX Runtime with the PyTorch segments around them. Returns the nodes that move, too."""
    kept: list[Cut] = []
    given_up: dict[fx.Node, Refusal] = {}
    for index, item in enumerate(cuts):
        runner = item.runner
        if runner is Runner.ORT and _is_between_pytorch(cuts, index) and _is_small(item):
            runner = Runner.PYTORCH
            given_up |= dict.fromkeys(item.nodes, Refusal(Reason.SMALL))
        if runner is Runner.PYTORCH and kept and kept[-1].runner is runner:
            kept[-1] = Cut(runner, [*kept[-1].nodes, *item.nodes])
        else:
            kept.append(Cut(runner, list(item.nodes)))
    return kept, given_up


def _is_between_pytorch(cuts: Sequence[Cut], index: int) -> bool:
    neighbours = cuts[index - 1 : index + 2 : 2] if index else ()
    return len(neighbours) == 2 and all(item.runner is Runner.PYTORCH for item in neighbours)


def _is_small(item: Cut) -> bool:
    if any(part in op_name(node) for node in item.nodes for part in HEAVY):
        return False
    elements = sum(hinted_elements(fake) for node in item.nodes for fake in fakes_in(node.meta["val"]))
    return elements < MIN_HANDOVER_ELEMENTS


def _needed(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes that are computed for the outputs, or do more than give a result."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read = not needed.isdisjoint(node.users)
        if not is_size(node) and (is_read or node.is_impure() or is_random(node) or is_watch_call(node)):
            needed.add(node)
    return [node for node in graph.nodes if node in needed and node.op == "call_function" and not is_getitem(node)]
