"""Checks of `benchmarks/on_cuda.py` for values that move to host memory and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ort_accel
from benchmarks.cuda_bench import FP32, Bench, accelerated, peak_of_steps
from ort_accel.cli.benchmark.contenders import distances
from ort_accel.cli.benchmark.workload import Workload
from ort_accel.recompute import planner
from ort_accel.recompute.budget import MemoryPlan
from ort_accel.recompute.cost import FLOPS_PER_MS
from ort_accel.recompute.offload_schedule import LINK_BYTES_PER_MS


def check_offload(bench: Bench) -> None:
    """Move values to host memory between forward and backward: all of them, and those that a budget chooses."""
    size = bench.workload("bert", dropout=0.1)
    with everything_moved():
        bench.looked("memory.offload, all that can be", lambda: offload_fault(bench, size, "1TiB"))
    bench.looked("memory.offload, for a budget", lambda: offload_fault(bench, size, 0.7))
    if bench.is_cuda:
        copies, products = rates(bench.device)
        assumed = f"{FLOPS_PER_MS / LINK_BYTES_PER_MS:,.0f} assumed"
        ratio = f"{products / copies:,.0f} operations in the time of a byte, {assumed}"
        bench.figures["link to the host"] = f"{copies / 1e9:.1f} GB/s; {products / 1e12:.1f} TFLOP/s in bf16: {ratio}"


@contextmanager
def everything_moved() -> Iterator[None]:
    """While this is entered, a budget moves all values that can be, and computes none again."""
    within, movable = planner.fit_budget, planner.OffloadCandidates
    names: list[str] = []

    class Noted(movable):
        def __init__(self, *how: Any) -> None:
            super().__init__(*how)
            names[:] = self.values

    def all_of_them(_: Any, sequences: Any) -> Any:
        first = next(sequences[0])
        return [first, dataclasses.replace(first, chosen=MemoryPlan(moved=frozenset(names)))]

    planner.fit_budget, planner.OffloadCandidates = all_of_them, Noted
    try:
        yield
    finally:
        planner.fit_budget, planner.OffloadCandidates = within, movable


def offload_fault(bench: Bench, size: Workload, budget: str | float) -> str:
    """Return how a step that moves values differs from one that moves none, to the bit where that one repeats its bits.

    A peak that does not fall is a fault, too.
    """
    model, batch = bench.model(size)
    plain = accelerated(model, memory={"level": 0})
    ours = accelerated(model, memory={"budget": budget, "offload": True})
    (first, again), before = peak_of_steps(bench, plain, batch)
    (_, found), after = peak_of_steps(bench, ours, batch)
    memory = list(ort_accel.report(ours).memory.values())[-1]
    figures = (
        f"{memory.moved / 2**20:,.1f} MiB moved; peak of a step {before / 2**20:,.1f} MiB, then {after / 2**20:,.1f}"
    )
    foreseen = f"{memory.frontier[0].bytes / 2**20:,.1f}, then {memory.frontier[-1].bytes / 2**20:,.1f}"
    bench.figures[f"memory.offload, budget {budget}"] = f"{figures}; as foreseen {foreseen}"
    repeated = [name for name, each in first.gradients.items() if torch.equal(each, again.gradients[name])]
    differing = [name for name in repeated if not torch.equal(found.gradients[name], first.gradients[name])]
    if found.loss != first.loss or differing:
        return f"loss {found.loss} where it was {first.loss}, other bits in {', '.join(differing) or 'no gradient'}"
    far = {name: share for name, share in distances(found, first).items() if not share <= FP32}
    if far:
        return f"off by a share of its length: {far}"
    return "" if after < before or not bench.is_cuda else f"the peak did not fall: {figures}"


def rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second from the device into pinned memory, and operations a second of a large product in bf16."""
    value, factor = (
        torch.empty(2**28, dtype=torch.uint8, device=device),
        torch.ones(8192, 8192, device=device).bfloat16(),
    )
    pinned = torch.empty_like(value, device="cpu", pin_memory=True)

    def seconds(work: Callable[[], Any]) -> float:
        work()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 4e3

    copied = seconds(lambda: pinned.copy_(value, non_blocking=True))
    return value.nbytes / copied, 2 * factor.shape[0] ** 3 / seconds(lambda: factor @ factor)
