"""Decisions give nodes to PyTorch one after the other; small segments of ONNX Runtime go to PyTorch."""

from __future__ import annotations

import torch

from ort_accel.partition.assign import Refusal
from ort_accel.partition.known_slow_ops import MIN_HANDOVER_ELEMENTS
from ort_accel.partition.placement import by_rule, merge_small_segments, place
from ort_accel.partition.segments import Cut, cut
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.segments import Runner
from tests.partition.test_segments import assign, graph_of, only

aten = torch.ops.aten


def test_a_later_decision_is_not_asked_about_nodes_of_pytorch():
    asked = []
    graph = graph_of(lambda x: x.sin().cos().exp(), torch.ones(3))
    late = by_rule(lambda node: asked.append(node.target) or (Refusal(Reason.SMALL) if "exp" in node.name else None))
    assignment = place(graph, [only(aten.cos.default), late])
    assert asked == [aten.sin.default, aten.exp.default]
    assert [node.target for node in assignment.undecided] == [aten.sin.default]
    assert [refusal.reason for refusal in assignment.refusals.values()] == [Reason.WISH, Reason.SMALL]


def cuts_around(elements: int, op) -> list[Cut]:
    """PyTorch, ONNX Runtime, PyTorch."""
    graph = graph_of(lambda x: op(x.sin()).cos(), torch.ones(elements, 1))
    decide = only(aten.sin.default, aten.cos.default)
    return cut(graph, assign(graph, decide))


def test_a_small_segment_goes_to_its_neighbours():
    merged, given_up = merge_small_segments(cuts_around(16, torch.exp))
    assert [item.runner for item in merged] == [Runner.PYTORCH]
    assert [node.target for node in given_up] == [aten.exp.default]


def test_a_large_segment_is_kept():
    merged, given_up = merge_small_segments(cuts_around(MIN_HANDOVER_ELEMENTS, torch.exp))
    assert [item.runner for item in merged] == [Runner.PYTORCH, Runner.ORT, Runner.PYTORCH]
    assert not given_up


def test_a_segment_with_a_product_is_kept():
    merged, _ = merge_small_segments(cuts_around(16, lambda x: x.mm(x.t())))
    assert Runner.ORT in {item.runner for item in merged}


def test_a_segment_at_either_end_is_kept():
    graph = graph_of(lambda x: x.exp().sin().exp(), torch.ones(4))
    merged, _ = merge_small_segments(cut(graph, assign(graph, only(aten.sin.default))))
    assert [item.runner for item in merged] == [Runner.ORT, Runner.PYTORCH, Runner.ORT]
