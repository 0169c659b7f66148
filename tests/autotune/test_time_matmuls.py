"""Large products are timed at their own sizes, in PyTorch and in ONNX Runtime."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.autotune import time_matmuls
from ort_accel.autotune.cost_model import Estimator
from ort_accel.autotune.throughput import KernelTimes, Machine, is_timed
from ort_accel.autotune.time_matmuls import LARGE_FLOPS, MAX_TIMED_FLOPS, TimedMatmuls
from ort_accel.compiler.compile_graph import Lowering, lower_graph
from ort_accel.operators.flops import flops
from ort_accel.reporting.report import Report
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions
from tests.against_eager import assert_step_as_eager, pair

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
    times = {"ort": 1.0, "pytorch": 1.0}
    equal = KernelTimes(0.1 * MILLI, 0.1 * MILLI, 1 << 20)

    def found(_, node):
        return KernelTimes(*(one * MILLI for one in times.values()), flops(node))

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
def test_a_large_product_is_timed_on_both_sides(monkeypatch, operands, target):
    monkeypatch.setattr(time_matmuls, "_KNOWN", {})
    node = node_of(*fakes(*operands), target=target)
    assert flops(node) >= LARGE_FLOPS
    found = TimedMatmuls(MACHINE).kernel_times(node)
    assert found is not None
    assert min(found.ort, found.pytorch) > 0
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
    assert TimedMatmuls(MACHINE).kernel_times(node_of(*fakes((64, 64), (64, 64)))) is None


def test_equal_products_are_timed_once(monkeypatch):
    monkeypatch.setattr(time_matmuls, "_KNOWN", {})
    counted = []
    monkeypatch.setattr(time_matmuls, "_measured", lambda _, node: counted.append(node))
    timed = TimedMatmuls(MACHINE)
    for rows in (1024, 1024, 2048):
        timed.kernel_times(node_of(*fakes((rows, 512), (512, 256))))
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


@pytest.mark.parametrize(
    ("ort", "counts"), [(2.0, 2.0), (2.4, 3.0), (2.9, 3.0), (3.5, 3.5)], ids=["clear", "better", "equal", "worse"]
)
def test_onnx_runtime_has_to_be_clearly_faster_to_count_as_faster(known, ort, counts):
    known.update(ort=ort, pytorch=3.0)
    found = TimedMatmuls(MACHINE).kernel_times(node_of(*fakes((1024, 512), (512, 256))))
    assert (found.ort, found.pytorch) == pytest.approx((counts * MILLI, 3 * MILLI))


@pytest.mark.parametrize(("ort", "moves"), [(1.0, False), (9.0, True)], ids=["faster", "slower"])
def test_products_run_where_they_are_faster(known, ort, moves):
    known.update(ort=ort, pytorch=3.0)
    report = Report()
    lowering = Lowering(Sessions(MACHINE.settings), 20, report, estimator=Estimator(MACHINE, TimedMatmuls(MACHINE)))
    inputs = torch.randn(1024, 512), torch.randn(512, 512)
    traced = make_fx(lambda x, y: [x.mm(y)], tracing_mode="fake")(*inputs)
    program = lower_graph(traced, lowering, "forward 0")
    assert [item.op for item in report.fallbacks] == (["aten.mm.default"] if moves else [])
    torch.testing.assert_close(program(list(inputs))[0], inputs[0].mm(inputs[1]), rtol=1e-4, atol=1e-2)


class Wide(nn.Module):
    """Products that are large enough to be timed, and a dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return self.down(nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.1)).square().mean()


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
