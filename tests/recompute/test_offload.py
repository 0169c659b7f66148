"""Offload: a budget moves values to host memory if that is cheapest, and they come back bit for bit.

The tests offload on the CPU. Every copy is made as late as possible: when the program waits for it.
"""

import copy
import dataclasses
import random
import re

import pytest
import torch
from rich.console import Console
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

import ort_accel
from ort_accel.compiler import settings
from ort_accel.errors import OrtAccelError
from ort_accel.kernels import host_copies
from ort_accel.observe.memory_table import render_memory
from ort_accel.recompute import offload, offload_schedule, planner
from ort_accel.recompute.budget import MemoryPlan, frontier
from ort_accel.recompute.live_memory import Moment
from ort_accel.recompute.offload import OffloadSite
from ort_accel.recompute.offload_schedule import (
    PassTiming,
    SyncPoint,
    schedule_offload,
    schedule_prefetch,
    stall_ms,
)
from ort_accel.recompute.peak_memory import StepMemory
from ort_accel.recompute.plans import RecomputeSite
from ort_accel.recompute.saved_values import SavedValue
from ort_accel.reporting.memory import PlanKind
from ort_accel.runtime import device
from ort_accel.runtime.host_memory import HostMemory
from tests.against_eager import assert_same, compilations, step
from tests.recompute.models import accelerated, assert_same_bits, model_and_batch
from tests.tiers import mostly_long


class LateMemory(HostMemory):
    """Host memory whose copies hold NaN until the program waits for them."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.begun = 0
        self.pending = {}
        self.results = []

    def _begin(self, source, result):
        result.fill_(torch.nan if result.is_floating_point() else 1)
        self.begun += result.nbytes
        self.pending[result.data_ptr()] = source
        self.results.append(StorageWeakRef(result.untyped_storage()))
        return result

    def settle(self, result):
        result.copy_(self.pending.pop(result.data_ptr()))

    def is_empty(self):
        return not self.pending and all(result.expired() for result in self.results)


@pytest.fixture
def late(monkeypatch):
    """Let models on the CPU offload values of every size, as on a device whose memory pool is shared."""
    memory = LateMemory()
    monkeypatch.setattr(host_copies, "host_memory", lambda _: memory)
    monkeypatch.setattr(settings, "place_for", lambda *_: device.ExecutionDevice(torch_memory=True))
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    return memory


def move_some(monkeypatch, share):
    """Let a budget offload a random share of all values, and recompute nothing."""

    def chosen(_, frontiers):
        [plain, _] = frontiers
        first = next(plain)
        return [first, dataclasses.replace(first, chosen=MemoryPlan(moved=frozenset(drawn[-1])))]

    class Drawn(planner.OffloadCandidates):
        def __init__(self, *how):
            super().__init__(*how)
            drawn.append(random.Random(len(self.values)).sample(list(self.values), int(share * len(self.values))))

    drawn = []
    monkeypatch.setattr(planner, "fit_budget", chosen)
    monkeypatch.setattr(planner, "OffloadCandidates", Drawn)


def losses_at_once(model, batch):
    """Accumulate gradients of two forwards, run one backward twice, and one forward without backward."""
    model.zero_grad()
    torch.manual_seed(1)
    first, second = model(**batch).loss, model(**batch).loss
    model(**batch)
    second.backward(retain_graph=True)
    first.backward()
    second.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@torch._functorch.config.patch(donated_buffer=False)  # which forbids a second backward
@pytest.mark.parametrize(("name", "share"), mostly_long([("bert", 1.0), ("gpt2", 0.5)], ("gpt2", 0.5)))
def test_offloaded_values_come_back_bit_for_bit(late, monkeypatch, name, share):
    plain = accelerated(name, {"level": 0})
    batch = model_and_batch(name)[1]
    trace, together = step(plain, **batch), losses_at_once(plain, batch)
    move_some(monkeypatch, share)
    ours = accelerated(name, {"budget": "1GiB", "offload": True})
    assert_same_bits(step(ours, **batch), trace)
    [memory] = ort_accel.report(ours).memory.values()
    assert late.begun == 2 * memory.moved
    assert memory.stash == memory.stash_without - memory.moved
    assert memory.moved > 0.3 * share * memory.stash_without
    assert late.is_empty()
    for one, other in zip(losses_at_once(ours, batch), together, strict=True):
        assert torch.equal(one, other)
    assert late.is_empty()


class Chain(nn.Module):
    """Layers that each save values of one size. Random factors cannot be recomputed."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.rand_like(x)
        return x.square().mean()


def on_a_budget(model, budget, *, offload):
    settings = {"memory": {"budget": budget, "offload": offload}, "observe": {"log_level": "error"}}
    return ort_accel.accelerate(copy.deepcopy(model), settings)


def test_offload_keeps_a_budget_that_recompute_alone_cannot(late, monkeypatch):
    monkeypatch.setattr(offload_schedule, "LINK_BYTES_PER_MS", 500e3)
    torch.manual_seed(0)
    model, batch = Chain(8), torch.randn(1024, 64)
    with pytest.raises(OrtAccelError, match="everything computed again that can be") as error:
        step(on_a_budget(model, 0.01, offload=False), batch)
    budget = float(str(error.value).partition("can be kept is ")[2].partition(";")[0]) - 0.04
    ours = on_a_budget(model, budget, offload=True)
    assert_same(step(ours, batch), step(model, batch))
    [memory] = ort_accel.report(ours).memory.values()
    without, *_, chosen = memory.frontier
    assert max(sum(stage.amounts.values()) for stage in memory.stages) == chosen.bytes <= budget * without.bytes
    assert late.begun == 2 * memory.moved > 0
    assert sum(row.applied for row in memory.plans if row.kind == PlanKind.OFFLOAD) > 0
    assert f"{memory.moved / 2**20:,.1f} MiB" in ort_accel.report(ours).features["memory.offload"].effect
    with (console := Console(width=200)).capture() as shown:
        console.print(render_memory(ort_accel.report(ours)))
    assert re.search(r"moved to host memory +\d", shown.get())
    assert re.search(r"ON +[+\w]+ offload", shown.get())
    step(ours, batch[:768])
    compiled = compilations(ours)
    assert_same(step(ours, batch[:512]), step(model, batch[:512]))
    assert compilations(ours) == compiled
    assert late.is_empty()


@pytest.mark.long
def test_an_infeasible_budget_names_the_smallest_one_with_offload(late):
    with pytest.raises(OrtAccelError, match="everything computed again or moved that can be"):
        step(on_a_budget(Chain(2), 0.01, offload=True), torch.randn(64, 64))


TIMING = PassTiming(starts_ms=[0.0, 1.0, 2.0, 3.0, 4.0], boundary={"early": 1, "late": 3})


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(offload_schedule, "LINK_BYTES_PER_MS", 1.0)


def test_copies_start_after_the_last_reader_and_run_one_after_the_other(slow):
    sizes = {"early": 2, "late": 2}
    points = schedule_offload(TIMING, sizes)
    assert points == [SyncPoint(1, ("early",), ()), SyncPoint(3, ("late",), ("early",)), SyncPoint(4, (), ("late",))]
    assert stall_ms(TIMING, points, sizes) == 1, "the last copy takes a millisecond longer than the forward"


def test_prefetches_start_as_late_as_the_link_allows(slow):
    sizes = {"early": 1, "late": 1}
    points = schedule_prefetch(TIMING, sizes)
    assert points == [SyncPoint(0, ("early",), ()), SyncPoint(1, (), ("early",)), *later(2, "late")]
    assert stall_ms(TIMING, points, sizes) == 0
    crowded = {"early": 1, "late": 4}
    assert stall_ms(TIMING, schedule_prefetch(TIMING, crowded), crowded) == 2, (
        "five milliseconds of copies, three before the last reader"
    )


def later(node, name):
    return [SyncPoint(node, (name,), ()), SyncPoint(node + 1, (), (name,))]


def test_many_values_share_few_sync_points(slow):
    timing = PassTiming(starts_ms=list(range(101)), boundary={str(place): place for place in range(100)})
    assert len(schedule_offload(timing, dict.fromkeys(timing.boundary, 1))) <= 2 * offload_schedule.COPY_GROUPS


class Queue:
    """Offload costs: the given milliseconds for a single value, and ten times as many for several."""

    def __init__(self, alone):
        self.alone = alone

    def cost_ms(self, names):
        return sum(self.alone[name] for name in names) * (1 if len(names) == 1 else 10)


def candidates(again, moved):
    """Values of a KiB that can be recomputed or offloaded in the given milliseconds."""
    graph, queue = fx.Graph(), Queue(moved)
    kept = {name: SavedValue(graph.create_node("call_function", torch.relu, (), {}, name)) for name in again}
    for item in kept.values():
        item.node.meta["val"] = torch.empty(256, device="meta")
    places = [
        RecomputeSite("Relu+", PlanKind.RECOMPUTE, frozenset([kept[n].node]), (kept[n],), cost_ms=cost)
        for n, cost in again.items()
    ]
    return [*places, *(OffloadSite(item, queue) for item in kept.values())]


@pytest.mark.parametrize(
    ("again", "moved", "names"),
    [
        ({"a": 5.0}, {"a": 1.0}, {"a"}),
        ({"a": 1.0}, {"a": 5.0}, set()),
        ({"a": 5.0, "b": 5.0}, {"a": 1.0, "b": 2.0}, {"a"}),  # the second copy would wait for the first
    ],
)
def test_each_value_is_recomputed_or_offloaded_whichever_is_cheaper(again, moved, names):
    def predict(plan):
        assert not plan.packs_masks
        gone = plan.moved.union(node.name for node in plan.recomputed)
        live = {name: 1024 for name in again if name not in gone}
        return StepMemory(0, 0, peak=Moment(live, 16 * 2048))

    *_, last = frontier([candidates(again, moved)], (), predict)
    assert last.chosen.moved == names
    assert {node.name for node in last.chosen.recomputed} == set(again) - names
