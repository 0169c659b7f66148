"""A graph is cut where control must change hands, and nowhere else."""

import operator

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.lowering.assign import Refusal
from ort_accel.lowering.islands import MOST_ELEMENTS, merge_islands
from ort_accel.lowering.nodes import is_view
from ort_accel.lowering.segments import Cut, assign, body_of, cut
from ort_accel.reporting import Reason, Runner

aten = torch.ops.aten


def graph_of(function, *inputs) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def only(*pytorch_ops):
    """Decide that PyTorch runs these operators and ONNX Runtime all others."""
    return lambda node: Refusal(Reason.WISH) if node.target in pytorch_ops else None


def runs(graph: fx.Graph, decide):
    """Who runs which operators, in order."""
    return [(item.runner, [node.target for node in item.nodes]) for item in cut(graph, assign(graph, decide))]


def test_one_runner_means_one_segment():
    graph = graph_of(lambda x: x.sin().cos().exp(), torch.ones(3))
    assert runs(graph, only()) == [(Runner.ORT, [aten.sin.default, aten.cos.default, aten.exp.default])]


def test_independent_work_is_collected_before_control_changes_hands():
    def two_branches(x, y):
        return x.sin().cos().exp(), y.sin().cos().exp()

    graph = graph_of(two_branches, torch.ones(3), torch.ones(3))
    assert runs(graph, only(aten.cos.default)) == [
        (Runner.ORT, [aten.sin.default] * 2),
        (Runner.PYTORCH, [aten.cos.default] * 2),
        (Runner.ORT, [aten.exp.default] * 2),
    ]


def test_every_node_is_run_exactly_once():
    graph = graph_of(lambda x: (x.sin().cos() + x.exp().sin()).cos() * x, torch.ones(3))
    cuts = cut(graph, assign(graph, only(aten.cos.default)))
    ran = [node for item in cuts for node in item.nodes]
    assert sorted(map(str, ran)) == sorted(str(node) for node in graph.nodes if node.op == "call_function")


def test_what_waits_for_a_node_that_nobody_runs_is_an_error_and_no_endless_loop():
    graph = graph_of(lambda x: x.sin().cos(), torch.ones(3))
    assignment = assign(graph, only())
    del assignment.runner[next(node for node in graph.nodes if node.target is aten.sin.default)]
    with pytest.raises(AssertionError, match=r"waits for what nothing gives: .*cos"):
        cut(graph, assignment)


def test_views_belong_to_whoever_looks_through_them():
    graph = graph_of(lambda x: x.sin().view(6).cos().view(2, 3).exp(), torch.ones(2, 3))
    assignment = assign(graph, only(aten.cos.default))
    assert {node.target for node in assignment.free} == {aten.view.default}
    first, second, third = cut(graph, assignment)
    assert [node.target for node in second.nodes] == [aten.cos.default]
    body = body_of(second.nodes, second.nodes, assignment.free)
    assert [node.target for node in body.nodes] == [aten.view.default, aten.cos.default]
    assert body.inputs == first.nodes
    assert all(not is_view(node) for item in (first, second, third) for node in item.nodes)


def test_a_view_that_onnx_cannot_express_is_run_by_pytorch():
    graph = graph_of(lambda x: x.sin().view(6).cos(), torch.ones(2, 3))
    assert runs(graph, only(aten.view.default)) == [
        (Runner.ORT, [aten.sin.default]),
        (Runner.PYTORCH, [aten.view.default]),
        (Runner.ORT, [aten.cos.default]),
    ]


def test_taking_one_of_several_outputs_is_not_work():
    graph = graph_of(lambda x: torch.var_mean(x, 0)[1].sin(), torch.ones(2, 3))
    assert operator.getitem in {node.target for node in graph.nodes}
    assert all(operator.getitem not in targets for _, targets in runs(graph, only()))


def test_random_draws_keep_their_order():
    def draws(x):
        late = torch.bernoulli(x.sin(), 0.5)
        early = torch.bernoulli(x, 0.5)
        return late + early

    graph = graph_of(draws, torch.ones(3))
    drawn = [node for node in graph.nodes if node.target is aten.bernoulli.p]
    assert len(drawn) == 2
    order = [node for item in cut(graph, assign(graph, only(aten.bernoulli.p))) for node in item.nodes]
    assert [node for node in order if node in drawn] == drawn


def test_a_write_keeps_its_place_among_reads():
    def writes(x):
        before = x.sin()
        x.copy_(before)
        return x.cos()

    graph = graph_of(writes, torch.ones(3))
    order = [node.target for item in cut(graph, assign(graph, only(aten.copy_.default))) for node in item.nodes]
    assert order == [aten.sin.default, aten.copy_.default, aten.cos.default]


def cuts_around(elements: int, op) -> list[Cut]:
    """PyTorch, ONNX Runtime, PyTorch."""
    graph = graph_of(lambda x: op(x.sin()).cos(), torch.ones(elements, 1))
    decide = only(aten.sin.default, aten.cos.default)
    return cut(graph, assign(graph, decide))


def test_a_small_island_is_given_to_its_neighbours():
    merged = merge_islands(cuts_around(16, torch.exp))
    assert [item.runner for item in merged.cuts] == [Runner.PYTORCH]
    assert [node.target for node in merged.given_up] == [aten.exp.default]


def test_a_large_one_is_kept():
    cuts = cuts_around(MOST_ELEMENTS, torch.exp)
    merged = merge_islands(cuts)
    assert [item.runner for item in merged.cuts] == [Runner.PYTORCH, Runner.ORT, Runner.PYTORCH]
    assert merged.given_up == []


def test_a_product_is_never_given_up():
    merged = merge_islands(cuts_around(16, lambda x: x.mm(x.t())))
    assert Runner.ORT in {item.runner for item in merged.cuts}


def test_a_segment_at_either_end_is_no_island():
    graph = graph_of(lambda x: x.exp().sin().exp(), torch.ones(4))
    merged = merge_islands(cut(graph, assign(graph, only(aten.sin.default))))
    assert [item.runner for item in merged.cuts] == [Runner.ORT, Runner.PYTORCH, Runner.ORT]
