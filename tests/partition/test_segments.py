"""A graph is cut where control must change hands, and nowhere else."""

import operator

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.graph.nodes import is_view
from ort_accel.kernels import bit_mask  # noqa: F401 -- the operators that a test calls
from ort_accel.partition.assign import Refusal
from ort_accel.partition.placement import by_rule, place
from ort_accel.partition.segments import body_of, cut
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.segments import Runner

aten = torch.ops.aten


def graph_of(function, *inputs) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def only(*pytorch_ops):
    """Decides that PyTorch runs these operators and ONNX Runtime all others."""
    return by_rule(lambda node: Refusal(Reason.WISH) if node.target in pytorch_ops else None)


def assign(graph, decide):
    return place(graph, [decide])


def runs(graph: fx.Graph, decide):
    """Returns who runs which operators, in order."""
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


def test_waiting_for_a_node_that_nobody_runs_is_an_error():
    graph = graph_of(lambda x: x.sin().cos(), torch.ones(3))
    assignment = assign(graph, only())
    del assignment.runner[next(node for node in graph.nodes if node.target is aten.sin.default)]
    with pytest.raises(AssertionError, match=r"waits for what nothing gives: .*cos"):
        cut(graph, assignment)


def test_each_segment_repeats_the_views_that_it_needs():
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


def test_getitem_nodes_are_in_no_segment():
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


LARGE = 1 << 18
"""Elements; a mask of so many is larger than `NEGLIGIBLE_BYTES`."""


def test_independent_nodes_run_in_the_segment_that_reads_them():
    """A backward computes such factors from dropout masks."""

    def masked(x, mask):
        return x.sin().cos() * (mask.float() * 2)

    graph = graph_of(masked, torch.ones(LARGE), torch.ones(LARGE, dtype=torch.bool))
    assert runs(graph, only(aten.cos.default)) == [
        (Runner.ORT, [aten.sin.default]),
        (Runner.PYTORCH, [aten.cos.default]),
        (Runner.ORT, [aten._to_copy.default, aten.mul.Tensor, aten.mul.Tensor]),
    ]


def test_the_other_runner_computes_them_in_the_segment_before():
    def masked(x, mask):
        return x.cos().sin().cos().sin() * mask.float()

    graph = graph_of(masked, torch.ones(LARGE), torch.ones(LARGE, dtype=torch.bool))
    assert runs(graph, only(aten.cos.default, aten._to_copy.default)) == [
        (Runner.PYTORCH, [aten.cos.default]),
        (Runner.ORT, [aten.sin.default]),
        (Runner.PYTORCH, [aten.cos.default, aten._to_copy.default]),
        (Runner.ORT, [aten.sin.default, aten.mul.Tensor]),
    ]


@pytest.mark.parametrize(
    "smaller", [lambda y: y.sum(), lambda y: (y * 2).sum(), lambda y: y > 0], ids=["a sum", "through more", "a mask"]
)
def test_a_result_smaller_than_its_inputs_is_computed_at_once(smaller):
    graph = graph_of(lambda x, y: x.sin().cos() * smaller(y), torch.ones(LARGE), torch.ones(LARGE))
    first, *_, last = runs(graph, only(aten.cos.default))
    assert aten.mul.Tensor not in first[1] or len(first[1]) > 2
    assert last == (Runner.ORT, [aten.mul.Tensor])


def test_a_value_that_is_read_twice_is_computed_for_the_first_reader():
    def both(x, mask):
        factor = mask.float()
        return (x * factor).cos() * factor

    graph = graph_of(both, torch.ones(LARGE), torch.ones(LARGE, dtype=torch.bool))
    assert runs(graph, only(aten.cos.default))[0] == (Runner.ORT, [aten._to_copy.default, aten.mul.Tensor])


def test_no_node_moves_past_a_write():
    def written(x, y):
        factor = y.float()
        y.zero_()
        return x.sin().cos() * factor

    graph = graph_of(written, torch.ones(LARGE), torch.ones(LARGE, dtype=torch.int32))
    order = [node.target for item in cut(graph, assign(graph, only(aten.cos.default))) for node in item.nodes]
    assert order.index(aten._to_copy.default) < order.index(aten.zero_.default)


def test_packed_masks_do_not_move_past_a_write():
    def written(x, y):
        mask = torch.rand(LARGE) > 0.5
        bits = torch.ops.ort_accel.to_bits(mask)
        y.zero_()
        return x.sin().cos() * mask, bits

    graph = graph_of(written, torch.ones(LARGE), torch.ones(LARGE))
    decide = only(aten.cos.default, aten.zero_.default, aten.rand.default, torch.ops.ort_accel.to_bits.default)
    order = [node.target for item in cut(graph, assign(graph, decide)) for node in item.nodes]
    assert order.index(torch.ops.ort_accel.to_bits.default) < order.index(aten.zero_.default)


def test_random_draws_are_late_and_in_order_with_their_packed_masks():
    def dropped(x):
        masks = [torch.rand(LARGE) > 0.5 for _ in range(2)]
        x = (x.sin() * masks[0]).cos().sin() * masks[1]
        return x, *map(torch.ops.ort_accel.to_bits, masks)

    graph = graph_of(dropped, torch.ones(LARGE))
    drawing = aten.rand.default, aten.gt.Scalar, torch.ops.ort_accel.to_bits.default
    assert runs(graph, only(aten.cos.default, *drawing)) == [
        (Runner.PYTORCH, [*drawing]),
        (Runner.ORT, [aten.sin.default, aten.mul.Tensor]),
        (Runner.PYTORCH, [*drawing[:2], aten.cos.default, drawing[2]]),
        (Runner.ORT, [aten.sin.default, aten.mul.Tensor]),
    ]


def test_a_mask_that_is_computed_last_is_packed_behind_it():
    def masked(x, index):
        mask = (torch.rand(LARGE) > 0.5)[index]
        return x.cos().sin() * mask, torch.ops.ort_accel.to_bits(mask)

    graph = graph_of(masked, torch.ones(LARGE), torch.arange(LARGE))
    in_pytorch = only(aten.cos.default, aten.rand.default, torch.ops.ort_accel.to_bits.default)
    *_, before, last = runs(graph, in_pytorch)
    assert aten.mul.Tensor in before[1]
    assert last == (Runner.PYTORCH, [torch.ops.ort_accel.to_bits.default])
