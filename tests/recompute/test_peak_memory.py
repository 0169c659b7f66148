"""The predicted peak of a step is that of the allocators of ONNX Runtime and PyTorch."""

import os
import resource

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.compiler import settings
from ort_accel.executor import torch_segment
from ort_accel.kernels import embedding_backward, output_buffers
from ort_accel.memory import malloc_settings
from ort_accel.memory.malloc_settings import COALESCING_TUNABLE, coalesces_freed_blocks, disable_trimming
from ort_accel.memory.process_memory import in_use
from ort_accel.recompute import planner
from ort_accel.runtime.ort_pool import release_unused
from tests.against_eager import step
from tests.forked import asked
from tests.recompute.models import accelerated, model_and_batch
from tests.tiers import mostly_long

ROWS = 256
"""Enough that ONNX Runtime's arena holds megabytes."""


def look(results, name, large):
    """Put what ONNX Runtime's arena holds after a step, the prediction, and the report of its memory."""
    for room in (settings, embedding_backward, output_buffers, torch_segment):
        room.LARGE = large
    seen = []

    def noted(*how):
        seen.append(predict(*how))
        return seen[-1]

    predict, planner.predict_step = planner.predict_step, noted
    model = accelerated(name, {"level": 0}, observe={"log_level": "error", "memory_stats": True})
    step(model, **model_and_batch(name, ROWS)[1])
    model.zero_grad()
    held = in_use()
    release_unused()
    [memory] = ort_accel.report(model).memory.values()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    results.put((held - in_use(), seen[-1].stages[0].ort_held_bytes, seen[-1].peak_bytes, memory, parameters))


@pytest.mark.parametrize("large", [128 << 10, 32 << 20], ids=["from 128 KiB on", "from 32 MiB on"])
@pytest.mark.parametrize("name", mostly_long(["bert", "llama"], "bert"))
def test_the_arena_holds_what_was_predicted(name, large):
    held, predicted, peak, memory, parameters = asked(look, name, large)
    assert held == pytest.approx(predicted, rel=0.1)
    totals = [sum(stage.amounts.values()) for stage in memory.stages]
    assert max(totals) == memory.frontier[-1].bytes == peak
    assert memory.stages[-1].amounts["gradients"] == parameters
    assert memory.stages[-1].amounts["optimizer states"] == 2 * parameters


@pytest.mark.parametrize(("large", "in_pool"), [(32 << 10, True), (32 << 20, False)])
def test_a_large_result_of_pytorch_counts_in_the_pool_that_holds_it(monkeypatch, large, in_pool):
    for room in (settings, embedding_backward, output_buffers, torch_segment):
        monkeypatch.setattr(room, "POOL_LEAST_BYTES", large)
    seen, predict = [], planner.predict_step
    monkeypatch.setattr(planner, "predict_step", lambda *how: seen.append(predict(*how)) or seen[-1])
    model = nn.Sequential(nn.Embedding(3000, 64), nn.Linear(64, 1))
    quiet = {"log_level": "error", "memory_stats": True}
    ort_accel.accelerate(model, {"memory": {"level": 0}, "observe": quiet})
    model(torch.randint(0, 3000, (2, 5))).sum().backward()
    [step] = seen
    assert (step.stages[0].ort_held_bytes >= model[0].weight.nbytes) is in_pool
    assert step.transient_bytes >= model[0].weight.nbytes


def test_gradients_that_are_released_early_are_never_live_together():
    early = {"level": 0, "early_gradient_release": True}
    optimizer = {"name": "adamw_ort_fused", "step_in_backward": True}
    model = accelerated("llama", early, optimizer=optimizer, observe={"log_level": "error", "memory_stats": True})
    step(model, **model_and_batch("llama", ROWS)[1])
    [memory] = ort_accel.report(model).memory.values()
    gradients = [stage.amounts["gradients"] for stage in memory.stages]
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert 0 < max(gradients) < parameters / 2
    assert gradients[-1] == 0


def test_a_level_leaves_nothing_unused_in_the_arena_after_the_backward():
    model = accelerated("llama", {"level": 1})
    step(model, **model_and_batch("llama", ROWS)[1])
    held = in_use()
    release_unused()
    assert held - in_use() < 2**16


def take_again(results, variables):
    """Put whether the heap keeps freed memory, and the page faults of writing to as much of it again."""
    os.environ.update(variables)
    kept = disable_trimming()
    results.put((kept, pages_written_again(2, 16, 2**22)))


def pages_written_again(rounds, count, size):
    """Return the page faults of the last round, which writes to blocks of a size and frees them."""
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(size // 4) for _ in range(count)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize(
    ("version", "tunables", "joins", "gaps"),
    [
        ("glibc 2.36", "", False, True),
        ("glibc 2.36", f"glibc.malloc.trim_threshold=1:{COALESCING_TUNABLE}", True, False),
        ("glibc 2.36", "glibc.malloc.tcache_count=07", False, True),
        ("glibc 2.39", "", True, False),
        ("glibc 2.4", "", False, True),
        ("", "", False, False),
    ],
)
def test_version_and_tunable_tell_if_freed_blocks_are_merged(version, tunables, joins, gaps, monkeypatch):
    monkeypatch.setattr(malloc_settings.os, "confstr", lambda _: version)
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    monkeypatch.setattr(malloc_settings, "coalesces_freed_blocks", coalesces_freed_blocks.__wrapped__)
    assert coalesces_freed_blocks.__wrapped__() is joins
    assert malloc_settings.fragments_heap() is gaps


PAGES = 16 * 2**22 // 4096


def test_the_heap_keeps_freed_memory_for_the_next_step():
    kept, pages = asked(take_again, {})
    if not kept:
        pytest.skip("this C library cannot be told")
    assert pages < PAGES / 10


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_TRIM_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000000"}],
    ids=["by a variable", "by a tunable"],
)
def test_settings_of_the_user_stay(variables):
    kept, _ = asked(take_again, variables)
    assert not kept


ALL, LARGE_ONLY = (0, 0, True), (0, 32 << 20, False)


@pytest.mark.parametrize(("level", "large", "lends"), mostly_long([ALL, LARGE_ONLY, (1, 0, False)], ALL, LARGE_ONLY))
def test_large_gradients_lie_in_the_arena_unless_memory_is_saved(monkeypatch, level, large, lends):
    monkeypatch.setattr(settings, "POOL_LEAST_BYTES", large)
    model = accelerated("bert", {"level": level})
    step(model, **model_and_batch("bert", 2)[1])
    owners = {parameter.grad.untyped_storage().resizable() for parameter in model.parameters()}
    assert owners == ({True, False} if lends else {True}), "what ONNX Runtime lends cannot be resized"
