"""Training steps beside eager PyTorch's while other processes keep the cores busy: `python benchmarks/under_load.py`.

ort_accel runs as it comes and may let eager PyTorch run its steps. All sides train on the same batches in turns, so
that what disturbs one disturbs the others. The ratio is that of whole times, steps of the comparison with eager mode
included; the first steps, up to the last compilation and three more, are left out. A second model in eager mode shows
the noise: its ratio would be 1 without any.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import ort_accel
from ort_accel.cli.benchmark import machine
from ort_accel.cli.benchmark.workload import Batch, Workload, batch_of, build

SMALL = {"hidden": 256, "heads": 4, "layers": 4}
WORKLOADS = {
    "bert": Workload(dropout=0.1, **SMALL),
    "bert, 35 % valid": Workload(density=0.35, **SMALL),
    "llama": Workload(model="llama", batch=4, **SMALL),
    "bert, ten layers": Workload(layers=10, hidden=192, heads=3, batch=4),
    "bert, tiny": Workload(layers=12, hidden=64, heads=2, batch=4, length=64, vocab=500),
}
EAGER, EAGER_AGAIN, OURS = range(3)
ORDERS = ((EAGER, OURS, EAGER_AGAIN), (EAGER_AGAIN, EAGER, OURS), (OURS, EAGER_AGAIN, EAGER))
SETTLED_STEPS = 3
ALLOWED = 1.03


def _work(parent: int) -> None:
    """Multiply matrices until the measuring process has ended."""
    torch.set_num_threads(1)
    values = torch.randn(256, 256)
    while os.getppid() == parent:
        values = (values @ values).tanh_()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """While this is entered, so many processes multiply matrices."""
    spawn = multiprocessing.get_context("spawn")
    started = [spawn.Process(target=_work, args=(os.getpid(),), daemon=True) for _ in range(processes)]
    for each in started:
        each.start()
    try:
        yield
    finally:
        for each in started:
            each.terminate()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, seed: int) -> tuple[float, float]:
    """Seconds of forward and backward, and the loss."""
    torch.manual_seed(seed)
    begin = time.perf_counter()
    loss = model(**batch).loss
    loss.backward()
    seconds = time.perf_counter() - begin
    optimizer.step()
    optimizer.zero_grad()
    return seconds, float(loss.detach())


def measure(workload: Workload, steps: int, *, always: bool = False) -> dict[str, Any]:
    """Train in eager PyTorch twice and on ort_accel, in turns. With `always`, the engine runs each of its steps."""
    eager = build(workload)
    models = [eager, copy.deepcopy(eager), copy.deepcopy(eager)]
    config: dict[str, Any] = {"version": 1, "observe": {"log_level": "error"}}
    if always:
        config["engine"] = {"compare_with_eager": False}
    ours = ort_accel.accelerate(models[OURS], config)
    rivals = [(model, torch.optim.SGD(model.parameters(), 1e-3)) for model in models]
    report = ort_accel.report(ours)
    seconds: list[list[float]] = []
    compiled, begin, furthest = 0, 0, 0.0
    while len(seconds) < begin + steps:
        count = len(seconds)
        batch = batch_of(workload, count)
        found = {side: step(*rivals[side], batch, count) for side in ORDERS[count % len(ORDERS)]}
        seconds.append([found[side][0] for side in range(len(rivals))])
        furthest = max(furthest, abs(found[EAGER][1] - found[OURS][1]))
        if report.counters["compilations"] != compiled:
            compiled, begin = report.counters["compilations"], count + 1 + SETTLED_STEPS
    sides = list(zip(*seconds[begin:], strict=True))
    comparison = str(report.comparison or report.features["engine.compare_with_eager"].reason)
    return {
        "workload": str(workload),
        "steps": steps,
        "ratio": sum(sides[OURS]) / sum(sides[EAGER]),
        "ratio of the second eager model": sum(sides[EAGER_AGAIN]) / sum(sides[EAGER]),
        "medians": [median(side) for side in sides],
        "loss": furthest,
        "comparison": comparison,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all workloads; 1 if one takes longer than eager PyTorch by more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=4, help="processes that keep the cores busy")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--always", action="store_true", help="the engine runs every step of ort_accel's model")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {"machine": machine.facts(torch.get_num_threads()), "found": {}}
    record |= {"busy": options.busy, "always": options.always}
    with busy(options.busy):
        for name in options.only:
            found = record["found"][name] = measure(WORKLOADS[name], options.steps, always=options.always)
            print(f"{name}: {found['ratio']:.2f} times eager's time over {found['steps']} steps", end=", ")
            print(
                f"a second eager model {found['ratio of the second eager model']:.2f}; {found['comparison']}",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(found["ratio"] > ALLOWED for found in record["found"].values()))


if __name__ == "__main__":
    sys.exit(main())
