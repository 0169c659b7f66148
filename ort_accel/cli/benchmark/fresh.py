"""Measures a contender in processes of its own: in one the seconds of its first step, in others its peak memory.

Every process imports everything first, so that loading libraries counts in no figure. A process that measures memory
runs a step of a tiny model first, since a compiler loads and keeps some memory once in a process. The positions of
blocks and the gaps between them vary, so the median of several processes counts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
import torch._inductor.compile_fx
from torch import nn

import ort_accel.engine  # noqa: F401  # imported now, so as not to be measured
from ort_accel.cli.benchmark import contenders
from ort_accel.cli.benchmark.workload import Batch, Workload, batch_of, build
from ort_accel.config import Config, load_config
from ort_accel.memory.process_memory import AllocationSampler, in_use, reset_high_water_mark, resident

Figures = dict[str, float | str | None]
"""Figures of a contender by name, or its error under `error`."""

LATER_STEPS = 3
TIMEOUT_SECONDS = 600


def in_fresh_processes(name: str, workload: Workload, config: Config, threads: int) -> Figures:
    """Returns the figures of one contender, or under `error` the message of a process that failed."""
    found: Figures = {}
    task = {"name": name, "workload": asdict(workload), "config": config.to_dict(), "threads": threads}
    for kind, (_, processes) in MEASUREMENTS.items():
        runs: list[Figures] = []
        for _ in range(processes):
            runs.append(_in_fresh_process({"kind": kind, **task}))
            if "error" in runs[-1]:
                return runs[-1]
        found |= {key: _median([run[key] for run in runs]) for key in runs[0]}
    return found


def _median(figures: Sequence[float | str | None]) -> float | None:
    """Returns the median; None if the system does not tell the figure."""
    known = [figure for figure in figures if isinstance(figure, float | int)]
    return statistics.median(known) if known else None


def _in_fresh_process(task: dict[str, object]) -> Figures:
    with tempfile.TemporaryDirectory() as empty:  # Inductor keeps what it compiled; a cold start must not find it
        done = subprocess.run(
            [sys.executable, "-m", "ort_accel.cli.benchmark.fresh"],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": empty},
            check=False,
        )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    found: Figures = json.loads(lines[-1])
    return found


def first_step(name: str, workload: Workload, config: Config) -> Figures:
    """Time the first step in this process."""
    model, batch = build(workload), batch_of(workload)
    start = time.perf_counter()
    _prepared_step(name, model, batch, workload.precision, config)
    return {"cold_seconds": time.perf_counter() - start}


def most_memory(name: str, workload: Workload, config: Config) -> Figures:
    """Returns the most memory of this process beyond model and batch, in the first step and in later ones.

    The resident set counts, and in one more step the memory in use, which has no gaps between blocks.
    """
    tiny = replace(workload, hidden=8 * workload.heads, layers=1, batch=1, length=4)
    _prepared_step(name, build(tiny), batch_of(tiny), workload.precision, config)
    model, batch = build(workload), batch_of(workload)
    begin, used = resident(), in_use()
    reset_high_water_mark()
    _prepared_step(name, model, batch, workload.precision, config)
    first = resident("VmHWM")
    for number in range(1 + LATER_STEPS):
        if number == 1:
            reset_high_water_mark()
        _later_step(model, batch, workload)
    later = resident("VmHWM")
    looking = AllocationSampler()
    _later_step(model, batch, workload)
    return {
        "first_step_mib": _mebibytes_between(begin, first),
        "later_steps_mib": _mebibytes_between(begin, later),
        "in_use_mib": _mebibytes_between(used, looking.end()),
    }


def _later_step(model: nn.Module, batch: Batch, workload: Workload) -> None:
    contenders.forget_gradients(model)
    contenders.step(model, batch, workload.precision)


def _mebibytes_between(begin: int | None, most: int | None) -> float | None:
    return None if begin is None or most is None else round((most - begin) / 2**20, 1)


MEASUREMENTS = {"first step": (first_step, 1), "memory": (most_memory, 5)}
"""Each measurement with its function and its number of processes."""


def _prepared_step(name: str, model: nn.Module, batch: Batch, precision: str, config: Config) -> None:
    contenders.prepare(name, model, config)
    contenders.step(model, batch, precision)


def main() -> None:
    """Read a task from standard input and print its figures."""
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    measurement, _ = MEASUREMENTS[task["kind"]]
    print(json.dumps(measurement(task["name"], Workload(**task["workload"]), load_config(task["config"]))))


if __name__ == "__main__":
    main()
