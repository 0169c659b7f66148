"""The predicted peak of a step is the measured one, and how the C library keeps memory."""

import os
import resource
from itertools import product

import pytest
import torch

import ort_accel
from ort_accel.memory import malloc_settings
from ort_accel.memory.malloc_settings import COALESCING_TUNABLE, coalesces_freed_blocks, disable_trimming
from tests.against_eager import step
from tests.forked import asked
from tests.recompute.models import accelerated, model_and_batch
from tests.tiers import mostly_long

ROWS = 4096
"""Enough that the moment of the peak lasts longer than the interval of its sampling."""

STEPS = 5
"""The step is measured after the heap has been trimmed."""


def train(results, name, config, native):
    """Put the report's memory, the measured peak and the bytes of parameters after some steps."""
    options = {
        "engine": {"compare_with_eager": False},
        "compute": {"native": native, "placement": "fixed"},
        "observe": {"log_level": "error", "memory_stats": True},
    }
    model = accelerated(name, config, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        step(model, **model_and_batch(name, ROWS)[1])
        optimizer.step()
        optimizer.zero_grad()
    found = ort_accel.report(model)
    [memory] = found.memory.values()
    results.put((memory, found.measured_peak, [parameter.nbytes for parameter in model.parameters()]))


@pytest.mark.parametrize(
    ("name", "native", "config"),
    mostly_long(
        product(["bert", "llama"], [True, False], [{"level": 0}, {"level": 1}]),
        ("llama", True, {"level": 1}),
    ),
    ids=[
        f"{name}, {sessions}, {how}"
        for name in ("bert", "llama")
        for sessions in ("one session", "between sessions")
        for how in ("for speed", "memory is saved")
    ],
)
def test_a_step_takes_the_memory_that_was_predicted(name, native, config):
    memory, measured, parameters = asked(train, name, config, native)
    peak = memory.frontier[-1].bytes
    assert peak == pytest.approx(measured.held + measured.in_use, rel=0.02)
    assert max(sum(stage.amounts.values()) for stage in memory.stages) == peak
    assert memory.stages[-1].amounts["gradients"] == sum(parameters)
    counts_of_steps = torch.float32.itemsize * len(parameters)
    assert memory.stages[-1].amounts["optimizer states"] == 2 * sum(parameters) + counts_of_steps


def gradients_by_stage(memory, **config):
    """Returns the bytes of gradients at the highest moment of each segment, and those of the parameters."""
    model = accelerated("llama", memory, observe={"log_level": "error", "memory_stats": True}, **config)
    step(model, **model_and_batch("llama", ROWS)[1])
    [found] = ort_accel.report(model).memory.values()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    return [stage.amounts["gradients"] for stage in found.stages], parameters


def test_gradients_that_are_released_early_are_never_live_together():
    together, parameters = gradients_by_stage({"level": 0})
    assert together[-1] == parameters
    early = {"level": 0, "early_gradient_release": True}
    released, _ = gradients_by_stage(early, optimizer={"name": "adamw_ort_fused", "step_in_backward": True})
    assert max(released) < parameters / 2
    assert released[-1] == 0


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
