"""A contender in a process of its own: the seconds of its first step, and its peak memory.

Every process imports everything first, so that libraries count in no figure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ort_accel.cli.benchmark.workload import Workload
from ort_accel.config import Config

STEPS = 3
TIMEOUT = 600
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def in_fresh_process(name: str, workload: Workload, config: Config, threads: int) -> dict[str, Any]:
    """The figures of one contender, or under `error` what its process said."""
    task = json.dumps({"name": name, "workload": asdict(workload), "config": config.to_dict(), "threads": threads})
    with tempfile.TemporaryDirectory() as empty:  # Inductor keeps what it compiled; a cold start must not find it
        done = subprocess.run(
            [sys.executable, "-m", "ort_accel.cli.benchmark.fresh"],
            input=task,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": empty},
            check=False,
        )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def measure(name: str, workload: Workload, config: Config, threads: int) -> dict[str, Any]:
    """The same in this process. Memory is what the process holds at most beyond model, batch and libraries."""
    import torch
    import torch._inductor.compile_fx

    import ort_accel.engine  # noqa: F401  # as above: imported now, so as not to be measured
    from ort_accel.cli.benchmark import contenders
    from ort_accel.cli.benchmark.workload import batch_of, build

    torch.set_num_threads(threads)
    model, batch = build(workload), batch_of(workload)

    def steps(count: int) -> None:
        for _ in range(count):
            contenders.forget_gradients(model)
            contenders.step(model, batch, workload.precision)

    begin = resident()
    reset_peak()
    start = time.perf_counter()
    contenders.prepare(name, model, config)
    steps(1)
    cold = time.perf_counter() - start
    first = resident("VmHWM")
    steps(1)
    reset_peak()
    steps(STEPS)
    later = resident("VmHWM")
    growth = [None if peak is None or begin is None else round(peak - begin, 1) for peak in (first, later)]
    return {"cold_seconds": cold, "first_step_mib": growth[0], "later_steps_mib": growth[1]}


def resident(key: str = "VmRSS") -> float | None:
    """MiB of memory in use, or with `VmHWM` the most since the last reset. None where the system does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:")), None)


def reset_peak() -> None:
    """Forget the most memory that was in use, where the system allows that."""
    with suppress(OSError):
        _RESET.write_text("5")


def main() -> None:
    """Read a task from standard input and print its figures."""
    from ort_accel.config import load_config

    task = json.load(sys.stdin)
    config = load_config(task["config"])
    print(json.dumps(measure(task["name"], Workload(**task["workload"]), config, task["threads"])))


if __name__ == "__main__":
    main()
