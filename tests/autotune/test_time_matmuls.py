"""Large products are timed at their own sizes; PyTorch's go to oneDNN where that is faster."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ort_accel
from ort_accel.autotune import time_matmuls
from ort_accel.autotune.cost_model import Estimator
from ort_accel.autotune.throughput import KernelTimes, Machine, is_timed
from ort_accel.autotune.time_matmuls import LARGE_FLOPS, MAX_TIMED_FLOPS, MatmulTimes, TimedMatmuls
from ort_accel.compiler.compile_graph import Lowering, lower_graph
from ort_accel.kernels import onednn_matmul
from ort_accel.kernels.onednn_matmul import ONEDNN_FROM_CALL
from ort_accel.operators.flops import flops
from ort_accel.reporting import Report
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions
from tests.against_eager import BETWEEN_SESSIONS, assert_step_as_eager, pair

aten = torch.ops.aten
MACHINE = Machine(SessionSettings(threads=1), 20)
MILLI = 1e-3


def node_of(*operands, target=aten.mm.default):
    graph = fx.Graph()
    given = []
    for number, operand in enumerate(operands):
        given.append(graph.placeholder(f"given_{number}"))
        given[-1].meta["val"] = operand
    node = graph.call_function(target, tuple(given))
    node.meta["val"] = target(*operands)
    return node


def fakes(*shapes, mode=None):
    with mode or torch._subclasses.FakeTensorMode():
        return [torch.empty(*shape) for shape in shapes]


@pytest.fixture
def known(monkeypatch):
    """Let every large product take the times that are put here, in milliseconds. Everything else is equally fast on
    either side, however busy this machine is."""
    times = {"ort": 1.0, "pytorch": 1.0, "onednn": 1.0}
    equal = KernelTimes(0.1 * MILLI, 0.1 * MILLI, 1 << 20)

    def found(_, node):
        ort, pytorch, ours = (None if one is None else one * MILLI for one in times.values())
        return MatmulTimes(ort, pytorch, ours, flops(node))

    monkeypatch.setattr(time_matmuls, "_measured", found)
    monkeypatch.setattr(time_matmuls, "_KNOWN", {})
    monkeypatch.setattr(Machine, "kernel_times", lambda _, target: equal if is_timed(target) else None)
    monkeypatch.setattr(Machine, "price", 0.02 * MILLI)
    return times


@pytest.mark.parametrize(
    ("operands", "target"),
    [
        (((1024, 512), (512, 256)), aten.mm.default),
        (((256,), (1024, 512), (512, 256)), aten.addmm.default),
    ],
    ids=["product", "with a row"],
)
def test_a_large_product_is_timed_on_all_sides(monkeypatch, operands, target):
    monkeypatch.setattr(time_matmuls, "_KNOWN", {})
    node = node_of(*fakes(*operands), target=target)
    assert flops(node) >= LARGE_FLOPS
    found = TimedMatmuls(MACHINE, Report())._times(node)
    assert found is not None
    assert min(found.ort, found.pytorch, found.onednn) > 0
    assert found.amount == flops(node)


def large_tensors():
    return {id(item) for item in gc.get_objects() if type(item) is torch.Tensor and item.nbytes >= 2**20}


def test_measuring_leaves_no_memory_behind_not_even_in_cycles():
    gc.collect()
    gc.disable()
    try:
        before = large_tensors()
        assert time_matmuls._measured(MACHINE, node_of(*fakes((1024, 512), (512, 1024)))) is not None
        assert large_tensors() == before
    finally:
        gc.enable()


def test_a_small_product_is_not_timed():
    assert TimedMatmuls(MACHINE, Report())._times(node_of(*fakes((64, 64), (64, 64)))) is None


def test_equal_products_are_timed_once(monkeypatch):
    monkeypatch.setattr(time_matmuls, "_KNOWN", {})
    counted = []
    monkeypatch.setattr(time_matmuls, "_measured", lambda _, node: counted.append(node))
    timed = TimedMatmuls(MACHINE, Report())
    for rows in (1024, 1024, 2048):
        timed._times(node_of(*fakes((rows, 512), (512, 256))))
    assert len(counted) == 2


@pytest.mark.parametrize("shapes", [((2048, 768), (768, 50257)), ((4096, 4096), (4096, 4096))], ids=str)
def test_a_part_of_a_huge_product_is_timed(shapes):
    operands = time_matmuls._operands(node_of(*fakes(*shapes)))
    made = node_of(*operands)
    assert MAX_TIMED_FLOPS / 8 < flops(made) <= MAX_TIMED_FLOPS
    assert max(operand.numel() for operand in operands) <= 1 << 24


def test_the_part_lies_in_memory_as_the_product_does():
    left, right = fakes((30522, 143), (768, 30522))
    one, other = time_matmuls._operands(node_of(left.t(), right.t()))
    assert one.stride(0) == other.stride(0) == 1
    assert one.shape[1] == other.shape[0]


def test_a_library_with_another_result_is_not_used(monkeypatch):
    monkeypatch.setattr(time_matmuls, "_KNOWN", {})
    monkeypatch.setattr(time_matmuls, "onednn_product", lambda *operands: aten.mm.default(*operands) * 1.01)
    found = TimedMatmuls(MACHINE, Report())._times(node_of(*fakes((1024, 512), (512, 256))))
    assert found is not None
    assert found.onednn is None
    assert not found.prefers_onednn


@pytest.mark.parametrize(
    ("times", "prefers"),
    [((1, 2.0, 1.8), True), ((1, 2.0, 1.99), False), ((1, 2.0, 3.0), False), ((1, 2.0, None), False)],
    ids=str,
)
def test_onednn_has_to_save_something(times, prefers):
    assert MatmulTimes(*times, amount=1).prefers_onednn is prefers


def test_onednn_counts_for_pytorch_where_sizes_are_fixed(known):
    known.update(ort=2.5, pytorch=3.0, onednn=2.0)
    timed = TimedMatmuls(MACHINE, Report())
    fixed = node_of(*fakes((1024, 512), (512, 256)))
    assert timed.kernel_times(fixed).pytorch == pytest.approx(2 * MILLI)
    assert timed.kernel_times(fixed, called=True).pytorch == pytest.approx(3 * MILLI), "a session has no call of oneDNN"
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    rows = mode.from_tensor(torch.empty(1024, 512))
    [right] = fakes((512, 256), mode=mode)
    assert timed.kernel_times(node_of(rows, right)).pytorch == pytest.approx(3 * MILLI)


@pytest.mark.parametrize(
    ("ort", "counts"), [(2.0, 2.0), (2.4, 3.0), (2.9, 3.0), (3.5, 3.5)], ids=["clear", "better", "equal", "worse"]
)
def test_onnx_runtime_has_to_be_clearly_faster_to_count_as_faster(known, ort, counts):
    known.update(ort=ort, pytorch=3.0, onednn=None)
    found = TimedMatmuls(MACHINE, Report()).kernel_times(node_of(*fakes((1024, 512), (512, 256))))
    assert (found.ort, found.pytorch) == pytest.approx((counts * MILLI, 3 * MILLI))


def lowered(function, *inputs):
    report = Report()
    timed = TimedMatmuls(MACHINE, report)
    lowering = Lowering(Sessions(MACHINE.settings), 20, report, estimator=Estimator(MACHINE, timed), products=timed)
    traced = make_fx(lambda *x: [function(*x)], tracing_mode="fake")(*inputs)
    return lower_graph(traced, lowering, "forward 0"), report


def test_products_in_pytorch_are_onednns_and_right(known, monkeypatch):
    known.update(ort=9.0, pytorch=3.0, onednn=2.0)
    asked = []
    product = onednn_matmul.onednn_product
    monkeypatch.setattr(onednn_matmul, "onednn_product", lambda *operands: asked.append(operands) or product(*operands))
    inputs = torch.randn(1024, 512), torch.randn(512, 512) / 20, torch.randn(512)

    def function(x, y, z):
        return torch.addmm(z, x.mm(y).t().mm(x), y)

    program, report = lowered(function, *inputs)
    for _ in range(ONEDNN_FROM_CALL):
        torch.testing.assert_close(program(list(inputs))[0], function(*inputs), rtol=1e-4, atol=1e-2)
    assert len(asked) == 3
    assert report.counters["products by oneDNN, where sizes come again"] == 3


def test_products_that_onnx_runtime_runs_faster_stay_there(known):
    known.update(ort=1.0, pytorch=3.0, onednn=2.0)
    _, report = lowered(lambda x, y: x.mm(y), torch.randn(1024, 512), torch.randn(512, 512))
    assert report.fallbacks == []


class Wide(nn.Module):
    """Products that are large enough to be timed, and a dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return self.down(nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.1)).square().mean()


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed sizes", "open sizes"])
def test_steps_are_eagers_before_and_behind_the_change_to_onednn(known, dynamic):
    known.update(ort=9.0, pytorch=3.0, onednn=2.0)
    eager, ours = pair(Wide().train(), BETWEEN_SESSIONS | {"engine": {"dynamic_shapes": dynamic}})
    for step in range(ONEDNN_FROM_CALL + 2):
        assert_step_as_eager(eager, ours, torch.randn(1100, 256), seed=step)
    assert ort_accel.report(ours).counters["products by oneDNN, where sizes come again"] > 0


@pytest.fixture
def taken_over(monkeypatch):
    """The products that oneDNN multiplies in place of ONNX Runtime."""
    asked = []
    product = time_matmuls.onednn_product
    monkeypatch.setattr(time_matmuls, "onednn_product", lambda *operands: asked.append(operands) or product(*operands))
    return asked


def test_onednn_takes_over_from_onnx_runtime_for_sizes_that_come_again(known, taken_over):
    known.update(ort=2.0, pytorch=5.0, onednn=1.5)
    eager, ours = pair(Wide().train(), BETWEEN_SESSIONS | {"engine": {"dynamic_shapes": True}})
    seen = []
    for step, rows in enumerate([1100] * ONEDNN_FROM_CALL + [1200, 1100]):
        taken_over.clear()
        assert_step_as_eager(eager, ours, torch.randn(rows, 256), seed=step)
        seen.append(len(taken_over))
    multiplied = ort_accel.report(ours).counters["products that oneDNN takes over where sizes come again"]
    assert seen == [0] * (ONEDNN_FROM_CALL - 1) + [multiplied, 0, multiplied]
    assert multiplied > 0


def test_onednn_does_not_take_over_faster_products_of_onnx_runtime(known, taken_over):
    known.update(ort=1.0, pytorch=5.0, onednn=2.0)
    eager, ours = pair(Wide().train(), BETWEEN_SESSIONS | {"engine": {"dynamic_shapes": True}})
    for step in range(ONEDNN_FROM_CALL + 1):
        assert_step_as_eager(eager, ours, torch.randn(1100, 256), seed=step)
    assert taken_over == []


@pytest.mark.parametrize(
    "config",
    [{"compute": {"placement": "fixed"}}, {"engine": {"deterministic": True}}, {"memory": {"level": 1}}],
    ids=["fixed placement", "deterministic", "level 1"],
)
def test_nothing_is_timed_where_bits_must_repeat(monkeypatch, config):
    monkeypatch.setattr(time_matmuls, "_measured", lambda *_: pytest.fail("a product was timed"))
    monkeypatch.setattr(time_matmuls, "_KNOWN", {})
    eager, ours = pair(Wide().train(), config)
    assert_step_as_eager(eager, ours, torch.randn(1100, 256))
