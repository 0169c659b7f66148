"""Tiny models of every architecture of transformers against eager: `python benchmarks/model_sweep.py`.

Each runs on three batches of different sizes, with padding and dropout, in a process of its own: it trains, or what
else `--way` names.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.utils import _pytree as pytree

import ort_accel
from benchmarks.sweep_tasks import TASKS, Batch, Task
from benchmarks.sweep_ways import WAYS, Way, difference, rough_difference
from benchmarks.tiny_models import OTHERWISE, tiny
from ort_accel.cli.quiet import quiet
from ort_accel.config import load_config
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report
from ort_accel.reporting.segments import Runner
from ort_accel.runtime.installed_ort import installed_runtime

SKIPPING = ("density.labels", "density.padding", "compute.upstream")
QUIET = {"observe": {"log_level": "error"}}


class Verdict(StrEnum):
    """What became of a model, worst last."""

    MATCH = "match"
    NOT_BUILT = "not tried: cannot be made, or not run in eager mode"
    UNSTEADY = "not compared: eager mode does not repeat its own numbers"
    TIMEOUT = "timeout"
    CRASH = "crash"
    ERROR = "error"
    MISMATCH = "mismatch"

    @property
    def is_fault(self) -> bool:
        """Whether the engine is to blame."""
        return self in {Verdict.TIMEOUT, Verdict.CRASH, Verdict.ERROR, Verdict.MISMATCH}


@dataclass
class Outcome:
    """One model: how it compares, and how it ran."""

    task: str
    kind: str
    name: str
    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0
    compilations: int = 0
    """In all three steps."""
    late: int = 0
    """In the third."""
    breaks: tuple[str, ...] = ()
    """Why a graph is divided, or not compiled."""
    by_ort: float = 0.0
    """The share of the estimated operations that ONNX Runtime ran."""
    rows: tuple[str, ...] = ()
    """What was said about rows that need not be computed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; 0 if nothing differs from eager."""
    options = _options(arguments)
    chosen = [
        (task, kind, name)
        for task in options.tasks or TASKS
        for kind, name in TASKS[task].classes()
        if not options.only or kind in options.only
    ]
    run = _Run(options.timeout, options.config, options.way)
    context = multiprocessing.get_context("fork")  # what is imported is imported once
    console = Console(stderr=True)
    outcomes: list[Outcome] = []
    with context.Pool(options.jobs) as pool:
        found = pool.imap_unordered(run, chosen)
        for outcome in track(found, "sweep", total=len(chosen), console=console):
            outcomes.append(outcome)
            if outcome.verdict.is_fault:
                console.print(f"{outcome.task} {outcome.kind}: {outcome.verdict}: {outcome.detail[:300]}", markup=False)
            if options.json:
                options.json.write_text(json.dumps(_record(outcomes, options.way), indent=1))
    Console(width=160).print(_table(outcomes), _totals(outcomes))
    return int(any(outcome.verdict.is_fault for outcome in outcomes))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; all without")
    parser.add_argument("--only", nargs="*", help="model types, such as bert")
    parser.add_argument(
        "--way", default="usual", choices=WAYS, help="; ".join(f"{k}: {w.about}" for k, w in WAYS.items())
    )
    parser.add_argument("--config", help="a configuration file of ort_accel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many models at a time")
    parser.add_argument("--timeout", type=float, default=240, help="seconds a model")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser.parse_args(arguments)


class _Run:
    """Runs a model in a process of its own, which may die."""

    def __init__(self, timeout: float, config: str | None, way: str) -> None:
        self._timeout, self._config, self._way = timeout, config, way

    def __call__(self, chosen: tuple[str, str, str]) -> Outcome:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            self._check(chosen, write)
        os.close(write)
        with os.fdopen(read) as answer:
            status = self._wait(child)
            if status is None:
                return Outcome(*chosen, Verdict.TIMEOUT, f"after {self._timeout:.0f} s")
            text = answer.read()
        if status or not text:
            return Outcome(*chosen, Verdict.CRASH, f"exit code {os.waitstatus_to_exitcode(status)}")
        values = json.loads(text)
        return Outcome(**values | {"verdict": Verdict(values["verdict"])})

    def _check(self, chosen: tuple[str, str, str], write: int) -> NoReturn:
        """In the child: one thread, for as many models at a time as there are processors."""
        try:
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            logging.disable(logging.ERROR)
            transformers.logging.set_verbosity(transformers.logging.CRITICAL)
            with os.fdopen(write, "w") as out:
                json.dump(dataclasses.asdict(check(*chosen, self._config, self._way)), out)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _wait(self, child: int) -> int | None:
        """The status that a child ends with; None if it takes too long."""
        end = time.monotonic() + self._timeout
        while time.monotonic() < end:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
            time.sleep(0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None


def check(task: str, kind: str, name: str, config: str | None = None, way: str = "usual") -> Outcome:
    """Run a model and its copy on the engine on the same batches, and compare."""
    outcome = Outcome(task, kind, name, Verdict.MATCH)
    start = time.perf_counter()
    model = _runnable(TASKS[task], WAYS[way], outcome)
    if model is not None:
        _compare(model, TASKS[task], WAYS[way], outcome, config or QUIET | WAYS[way].settings)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _runnable(task: Task, way: Way, outcome: Outcome) -> nn.Module | None:
    """The model, if eager mode runs it in that way, and gives the same numbers twice."""
    for otherwise in OTHERWISE:
        try:
            model = tiny(outcome.kind, outcome.name, task.labels, otherwise)
            eager = _prepared(model, way)
            for rows, length in task.sizes:
                first, again = (way.step(copy.deepcopy(eager), _batch(task, eager, rows, length)) for _ in range(2))
        except Exception as error:
            outcome.verdict, outcome.detail = Verdict.NOT_BUILT, f"{type(error).__name__}: {str(error)[:300]}"
            continue
        outcome.verdict, outcome.detail = Verdict.MATCH, ""
        if difference(first, again):
            outcome.verdict = Verdict.UNSTEADY
            return None
        return model
    return None


def _prepared(model: nn.Module, way: Way) -> nn.Module:
    """A copy."""
    model = copy.deepcopy(model)
    way.prepare(model)
    return model


def _batch(task: Task, model: nn.Module, rows: int, length: int) -> Batch:
    """In the type of the model's numbers."""
    torch.manual_seed(rows * length)
    return _converted(task.batch(model, rows, length), model)


def _converted(batch: Batch, model: nn.Module) -> Batch:
    dtype = next(model.parameters()).dtype

    def convert(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    converted: Batch = pytree.tree_map(convert, batch)
    return converted


def _compare(model: nn.Module, task: Task, way: Way, outcome: Outcome, config: Any) -> None:
    eager = _prepared(model, way)
    try:
        ours = ort_accel.accelerate(_prepared(model, way), quiet(load_config(config)))
        report = ort_accel.report(ours)
        for rows, length in task.sizes:
            before = report.counters["compilations"]
            batch = _batch(task, eager, rows, length)
            found, expected = way.step(ours, batch), way.step(eager, batch)
            if way.is_rough:
                wrong = rough_difference(found, expected, WAYS["usual"].step(model, _converted(batch, model)))
            else:
                wrong = difference(found, expected)
                wrong = "" if wrong and _is_rounding(eager, way, batch, config) else wrong
            if wrong:
                outcome.verdict, outcome.detail = Verdict.MISMATCH, f"{rows} x {length}: {wrong}"
                break
            outcome.late = report.counters["compilations"] - before
    except Exception as error:
        outcome.verdict, outcome.detail = Verdict.ERROR, f"{type(error).__name__}: {str(error)[:600]}"
        return
    _describe(report, outcome)


def _describe(report: Report, outcome: Outcome) -> None:
    outcome.compilations = report.counters["compilations"]
    divided = [item for item in report.fallbacks if item.reason in {Reason.GRAPH_BREAK, Reason.NOT_COMPILED}]
    outcome.breaks = tuple(f"{item.reason}: {item.op} {item.detail}"[:200] for item in divided)
    flops: Counter[Runner] = Counter()
    for segment in report.segments:
        flops[segment.runner] += segment.flops
    outcome.by_ort = flops[Runner.ORT] / max(flops.total(), 1)
    found = [report.features[name] for name in SKIPPING if name in report.features]
    outcome.rows = tuple(f"{item.name} {item.state}: {item.reason} {item.effect}" for item in found)


def _is_rounding(model: nn.Module, way: Way, batch: Batch, config: Any) -> bool:
    """Whether the two agree in double precision.

    In networks of ReLU and batch norm, for a few small pictures, rounding grows without limit: eager mode differs from
    itself as much, once each weight is changed by its last bit.
    """
    doubled = copy.deepcopy(model).double()
    ours = ort_accel.accelerate(copy.deepcopy(doubled), quiet(load_config(config)))
    batch = _converted(batch, doubled)
    return not difference(way.step(ours, batch), way.step(doubled, batch))


def _record(outcomes: list[Outcome], way: str) -> dict[str, object]:
    runtime = installed_runtime()
    return {
        "runtime": f"{runtime.distribution} {runtime.version}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "way": WAYS[way].about,
        "totals": dict(Counter(outcome.verdict.value for outcome in outcomes)),
        "models": [dataclasses.asdict(item) for item in sorted(outcomes, key=lambda item: (item.task, item.kind))],
    }


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("task", "model", "verdict", "detail", title="what does not match eager mode, or was not tried")
    for item in sorted(outcomes, key=lambda item: (not item.verdict.is_fault, item.task, item.kind)):
        if item.verdict is not Verdict.MATCH:
            table.add_row(item.task, item.kind, item.verdict, item.detail[:200])
    return table


def _totals(outcomes: list[Outcome]) -> Table:
    table = Table("task", *(verdict.name.lower() for verdict in Verdict), "whole graphs", "compiled in the third step")
    for task in dict.fromkeys(item.task for item in outcomes):
        mine = [item for item in outcomes if item.task == task]
        counts = Counter(item.verdict for item in mine)
        good = [item for item in mine if item.verdict is Verdict.MATCH]
        whole, late = sum(not item.breaks for item in good), sum(item.late > 0 for item in good)
        table.add_row(task, *(str(counts[verdict]) for verdict in Verdict), str(whole), str(late))
    return table


if __name__ == "__main__":
    sys.exit(main())
