"""The benchmark: it checks each contender, then times those that are right in turns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import nn

import ort_accel
from ort_accel.cli.benchmark import contenders, machine
from ort_accel.cli.benchmark.contenders import INDUCTOR, ORT_ACCEL, Judge
from ort_accel.cli.benchmark.fresh import Figures, in_fresh_processes
from ort_accel.cli.benchmark.machine import Facts
from ort_accel.cli.benchmark.timing import Ratio, Times, compare, in_turns, summary
from ort_accel.cli.benchmark.workload import Workload, batch_of, build
from ort_accel.config import Config
from ort_accel.reporting.report import Report
from ort_accel.reporting.segments import Runner


@dataclass
class Result:
    """Everything that was measured, and why some of it was not."""

    workload: Workload
    config: Config
    machine: Facts
    times: dict[str, Times] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)
    """The factor by which each other contender's step is longer than that of ort_accel."""
    fresh: dict[str, Figures] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    """Contenders whose loss or gradients are not eager's; they get no figures."""
    absent: dict[str, str] = field(default_factory=dict)
    """Contenders that cannot run here."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Contenders that could not be compared with eager."""
    report: Report | None = None

    @property
    def gflop(self) -> float | None:
        """Returns the estimated GFLOP of a step."""
        return sum(segment.flops for segment in self.report.segments) / 1e9 if self.report else None

    @property
    def ort_share(self) -> float | None:
        """Returns the share of the GFLOP that ONNX Runtime runs."""
        if not self.report or not self.gflop:
            return None
        ours = (segment.flops for segment in self.report.segments if segment.runner is Runner.ORT)
        return sum(ours) / 1e9 / self.gflop

    def to_dict(self) -> dict[str, object]:
        """Returns the result as plain data, for JSON."""
        return {
            "workload": asdict(self.workload),
            "config": self.config.to_dict(),
            "machine": self.machine,
            "seconds": {name: times.to_dict() for name, times in self.times.items()},
            "ratios": {name: ratio.to_dict() for name, ratio in self.ratios.items()},
            "fresh_process": self.fresh,
            "wrong": self.wrong,
            "absent": self.absent,
            "unjudged": self.unjudged,
            "gflop": self.gflop,
            "ort_share": self.ort_share,
            "report": self.report.to_dict() if self.report else None,
        }


@dataclass(frozen=True)
class Effort:
    """The amount of measuring."""

    steps: int = 15
    warmup: int = 3
    threads: int = 1
    fresh: bool = True
    """Also measure the first step and memory, each contender in a process of its own."""


def run(workload: Workload, config: Config, names: Sequence[str], effort: Effort) -> Result:
    """Measure the contenders."""
    torch.set_num_threads(effort.threads)
    result = Result(workload, config, machine.facts(effort.threads))
    speeds = machine.matmul_gflops(effort.threads, workload.precision)
    base, batch = build(workload), batch_of(workload)
    judge = Judge(base, batch, workload.precision)
    models: dict[str, nn.Module] = {}
    for name in names:
        model = copy.deepcopy(base)
        if _is_right(name, model, config, judge, result):
            models[name] = model
    if ORT_ACCEL in models:
        result.report = ort_accel.report(models[ORT_ACCEL])
    _time(models, workload, effort, result)
    again = machine.matmul_gflops(effort.threads, workload.precision)
    result.machine["matmul_gflops"] = {name: max(speed, again[name]) for name, speed in speeds.items()}
    result.machine["load_after"] = machine.load()
    if effort.fresh:
        for name in models:
            result.fresh[name] = in_fresh_processes(name, workload, config, effort.threads)
    return result


def _is_right(name: str, model: nn.Module, config: Config, judge: Judge, result: Result) -> bool:
    try:
        contenders.prepare(name, model, config)
        fault = judge.fault(model)
    except Exception as error:
        if name != INDUCTOR:
            raise
        result.absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return False
    if fault and name == INDUCTOR and result.workload.dropout:
        result.unjudged[name] = "it draws other random numbers than eager, so with dropout it cannot be compared"
    elif fault:
        result.wrong[name] = fault
        return False
    return True


def _time(models: dict[str, nn.Module], workload: Workload, effort: Effort, result: Result) -> None:
    """Time the models in turns. Each round has a batch of its own, the same for all models."""
    batches = [batch_of(workload, number) for number in range(effort.warmup + effort.steps)]
    steps = {
        name: partial(contenders.next_step, model, iter(batches), workload.precision) for name, model in models.items()
    }
    seconds = in_turns(steps, effort.steps, effort.warmup) if steps else {}
    result.times = {name: summary(values) for name, values in seconds.items()}
    if ORT_ACCEL in seconds:
        others = {name: values for name, values in seconds.items() if name != ORT_ACCEL}
        result.ratios = {name: compare(values, seconds[ORT_ACCEL]) for name, values in others.items()}
