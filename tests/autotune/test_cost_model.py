"""Untuned graphs are divided by the time of a call of each operator on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import ort_accel
from ort_accel.autotune import handover_cost
from ort_accel.autotune.cost_model import Estimator
from ort_accel.autotune.throughput import CALLS, KernelTimes, Machine, is_timed
from ort_accel.compiler.compile_graph import Lowering, lower_graph, predict_segments
from ort_accel.lowering.onnx_graph import OnnxGraph
from ort_accel.native.library import native_library
from ort_accel.operators.powers import SHORT_EXPONENTS
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report
from ort_accel.reporting.segments import Runner
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions
from tests.against_eager import assert_step_as_eager, pair

aten = torch.ops.aten
OPSET = 20
SETTINGS = SessionSettings(threads=1)
AMOUNT = 1 << 20


@dataclass(frozen=True)
class Known(Machine):
    """A machine whose times are given: milliseconds on either side for 2 ** 20 elements, or operations."""

    figures: dict = field(default_factory=dict, hash=False)
    price: float | None = 1e-6

    def kernel_times(self, target):
        figures = self.figures.get(str(target).split(".")[1])
        return KernelTimes(figures[0] / 1e3, figures[1] / 1e3, AMOUNT) if figures else None


class Lowered:
    """A function lowered for a machine."""

    def __init__(self, function, *inputs, price=1e-6, in_one_session=False, **figures) -> None:
        self.report = Report()
        estimator = Estimator(Known(SETTINGS, OPSET, figures, price), in_one_session=in_one_session)
        self.lowering = Lowering(
            Sessions(SETTINGS), OPSET, self.report, estimator=estimator, calls_pytorch=in_one_session
        )
        self.traced = make_fx(lambda *x: [function(*x)], tracing_mode="fake")(*inputs)
        self.program = lower_graph(self.traced, self.lowering, "forward 0")
        torch.testing.assert_close(self.program(list(inputs))[0], function(*inputs))

    def in_pytorch(self, reason=Reason.SLOWER):
        return {item.op.split(".")[1] for item in self.report.fallbacks if item.reason is reason}


def layers(x, y):
    """A gelu and a product, four times."""
    for _ in range(4):
        x = torch.nn.functional.gelu(x).mm(y)
    return x


LARGE = torch.randn(1024, 256), torch.randn(256, 256) / 16
SMALL = torch.randn(16, 256), torch.randn(256, 256) / 16


def test_nodes_that_pytorch_runs_faster_run_there():
    lowered = Lowered(layers, *LARGE, gelu=(4.0, 1.0), mm=(0.01, 0.02))
    assert lowered.in_pytorch() == {"gelu"}
    [fallback] = lowered.report.fallbacks
    assert (fallback.count, fallback.detail) == (4, "about 0.25 ms in PyTorch, 1 ms in ONNX Runtime")


def test_nodes_that_are_about_as_fast_stay():
    assert Lowered(layers, *LARGE, gelu=(1.0, 0.95), mm=(1.0, 0.95)).in_pytorch() == set()
    assert Lowered(layers, *LARGE, gelu=(1.0, 3.0), mm=(1.0, 3.0)).in_pytorch() == set()


def test_equally_fast_products_go_where_other_nodes_go():
    lowered = Lowered(layers, *LARGE, gelu=(4.0, 1.0), mm=(0.01, 0.0105))
    assert lowered.in_pytorch() == {"gelu", "mm"}
    details = {item.op: item.detail for item in lowered.report.fallbacks}
    assert details["aten.mm.default"] == "about 1.3 ms on either side, and in whole steps less in PyTorch"
    assert {item.runner for item in lowered.report.segments} == {Runner.PYTORCH}
    assert Lowered(layers, *LARGE, gelu=(4.0, 1.0), mm=(0.01, 0.012)).in_pytorch() == {"gelu"}


def test_a_gain_smaller_than_the_handover_moves_nothing():
    assert Lowered(layers, *LARGE, price=1.0, gelu=(4.0, 1.0), mm=(0.001, 0.1)).in_pytorch() == set()


def test_nodes_between_moved_ones_move_and_are_not_called_slower():
    lowered = Lowered(layers, *LARGE, price=0.2e-3, gelu=(1.0, 1.0), mm=(1.0, 0.1))
    assert lowered.in_pytorch() == {"mm"}
    assert lowered.in_pytorch(Reason.NEIGHBOUR) == {"gelu"}
    assert {item.runner for item in lowered.report.segments} == {Runner.PYTORCH}


@pytest.mark.skipif(native_library() is None, reason="the native library was not built")
def test_in_one_session_only_what_is_faster_is_called():
    """Small and equally fast nodes beside it have ONNX Runtime's kernels, since nothing is handed over."""

    def small_and_large(x, y):
        return x.tanh().mm(y)[:2].exp().mm(y)

    lowered = Lowered(small_and_large, *LARGE, in_one_session=True, tanh=(4.0, 1.0), mm=(0.001, 0.002))
    assert [item.op for item in lowered.report.fallbacks if item.is_called] == ["aten.tanh.default"]
    [segment] = lowered.report.segments
    assert (segment.runner, segment.called_nodes) == (Runner.ORT, 1)


def test_small_tensors_and_operators_that_are_not_timed_are_left_alone():
    assert Lowered(layers, *SMALL, gelu=(4.0, 1.0)).report.fallbacks == []
    assert Lowered(layers, *LARGE).report.fallbacks == []


def test_double_precision_is_not_measured():
    doubles = [item.double() for item in LARGE]
    assert Lowered(torch.mm, *doubles, mm=(4.0, 1.0)).report.fallbacks == []
    assert Lowered(torch.mm, *LARGE, mm=(4.0, 1.0)).in_pytorch() == {"mm"}


@pytest.mark.parametrize("power", [lambda x: x**1.7, lambda x: 2.5**x, lambda x: x**x])
def test_long_powers_are_no_squares(power):
    lowered = Lowered(lambda x: power(x) + x, LARGE[0].abs(), pow=(0.01, 1.0))
    [fallback] = [item for item in lowered.report.fallbacks if "pow" in item.op]
    assert fallback.detail == "0.8 ms in PyTorch, 1.7 ms in ONNX Runtime for 1024 x 512 elements"


@pytest.mark.parametrize("exponent", SHORT_EXPONENTS)
def test_short_powers_are_as_long_as_squares_and_call_no_kernel_of_powers(exponent, monkeypatch):
    written, op = [], OnnxGraph.op
    monkeypatch.setattr(
        OnnxGraph, "op", lambda graph, name, *given, **how: written.append(name) or op(graph, name, *given, **how)
    )
    positive = LARGE[0].abs() + 0.1
    assert not Lowered(lambda x: x**exponent + x, positive, pow=(0.01, 1.0)).report.fallbacks
    assert "Add" in written
    assert "Pow" not in written
    assert "pow" in Lowered(lambda x: (x**exponent).mm(x.mT), positive, pow=(4.0, 1.0)).in_pytorch()


def test_plans_for_memory_foresee_the_same_segments():
    lowered = Lowered(layers, *LARGE, gelu=(4.0, 1.0), mm=(0.01, 0.02))
    made = [(item.runner, sum(item.ops.values())) for item in lowered.report.segments]
    assert [(cut.runner, len(cut.nodes)) for cut in predict_segments(lowered.traced, (), lowered.lowering)] == made


@pytest.mark.parametrize("target", list(CALLS), ids=str)
def test_every_operator_in_the_list_can_be_timed_here(target):
    found = Machine(SETTINGS, OPSET).kernel_times(target)
    assert found.ort > 0
    assert found.pytorch > 0
    assert Machine(SETTINGS, OPSET).kernel_times(target) is found


def test_measuring_draws_no_random_numbers():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Machine(SessionSettings(threads=1, log_severity=4), OPSET - 1).kernel_times(aten.add.Tensor)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_does_not_matter_what_new_tensors_are_by_default():
    machine = Machine(SessionSettings(threads=1, log_severity=2), OPSET - 2)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), torch.inference_mode():
            found = machine.kernel_times(aten.mul.Tensor)
    finally:
        torch.set_default_dtype(torch.float32)
    assert machine.price > 0
    assert 0 < found.pytorch < 1


def test_a_handover_costs_at_least_what_onnxruntime_takes_alone():
    quiet = {handover_cost.WORK: 1.0, handover_cost.BOTH: 1.5, handover_cost.ORT: 0.1, handover_cost.PYTORCH: 0.01}
    assert handover_cost.Handover.of(quiet).price == 0.25
    assert handover_cost.Handover.of(quiet | {handover_cost.WORK: 2.0}).price == 0.05


def test_where_nothing_can_be_measured_nothing_moves():
    assert Lowered(layers, *LARGE, price=None, gelu=(4.0, 1.0)).report.fallbacks == []


def test_products_with_a_bias_take_as_long_as_those_without():
    machine = Machine(SETTINGS, OPSET)
    assert machine.kernel_times(aten.addmm.default) is machine.kernel_times(aten.mm.default)
    assert not is_timed(aten.cumsum.default)
    assert machine.kernel_times(aten.cumsum.default) is None


@pytest.mark.parametrize("placement", ["auto", "fixed", "onnxruntime"])
def test_steps_equal_eagers_wherever_they_run(placement):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 8))
    eager, ours = pair(layers, {"compute": {"placement": placement, "native": False}})
    assert_step_as_eager(eager, ours, torch.randn(600, 256), loss=lambda y: y.square().mean())
    report = ort_accel.report(ours)
    slower = (Reason.SLOWER, Reason.SLOWER_ELSEWHERE)
    moved = {item.op for item in report.fallbacks if item.reason in slower}
    if placement == "fixed":
        assert all(item.reason is not Reason.SLOWER for item in report.fallbacks)  # nothing was timed here
        assert moved == {"aten.gelu_backward.default", "aten.native_layer_norm_backward.default"}
    if placement == "onnxruntime":
        assert moved == set()
    assert report.features["compute.placement"].state == ("off" if placement == "onnxruntime" else "applied")


@pytest.mark.parametrize(
    "wish",
    [{"engine": {"deterministic": True}}, {"memory": {"level": 1}}, {"memory": {"early_gradient_release": True}}],
    ids=str,
)
def test_nothing_is_measured_where_bits_must_not_differ(wish):
    _, ours = pair(nn.Linear(4, 4), wish)
    ours(torch.randn(2, 4))
    assert "other machines" in ort_accel.report(ours).features["compute.placement"].effect


def test_nodes_between_16_bit_products_go_to_pytorch_with_them():
    halves = [item.bfloat16() for item in LARGE]

    def between(x, y):
        return (x.mm(y).float() + 1).bfloat16().mm(y)

    lowered = Lowered(between, *halves, price=0.1e-3)
    assert {item.runner for item in lowered.report.segments} == {Runner.PYTORCH}
    assert lowered.in_pytorch(Reason.SLOWER_ELSEWHERE) == {"_to_copy"}
