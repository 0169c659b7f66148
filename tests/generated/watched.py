"""Segments that go over to generated code, and what stands for the compiler and the clock."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ort_accel.compiler import generated_kernels
from ort_accel.executor.build_model import build
from ort_accel.executor.ort_segment import Fallback, OrtSegment
from ort_accel.generated import trial
from ort_accel.generated.clusters import Cluster
from ort_accel.generated.program import InductorProgram
from ort_accel.generated.takeover import SUFFIX, Generator, GeneratorSettings
from ort_accel.generated.trial import CLUSTERS, OPERATORS, PROGRAM
from ort_accel.generated.whole_graph import WholeGraph
from ort_accel.generated.worker import Outcome
from ort_accel.reporting.report import Report
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions
from tests.executor.one_session import OPSET
from tests.generated.python_kernels import PythonKernel
from tests.generated.traced import ANY_BYTES, Arguments, Traced, normal

THREAD = "ort_accel kernels"
MANY = 2 * (trial.TRIED_RUNS + 1)
"""Runs after which it is decided which way goes on."""


def wait() -> None:
    """Returns when nothing is being compiled any more."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()


def way_of(segment: OrtSegment) -> str:
    """Returns the way in which a session runs."""
    return CLUSTERS if b"cluster_" in segment._session_arguments[1] else OPERATORS


def before_each_run(patch: pytest.MonkeyPatch, tell: Callable[[str], None]) -> None:
    """Tells before each run of a segment who runs it: operators, generated kernels or a program."""
    by_session, by_program = OrtSegment.__call__, InductorProgram.__call__

    def in_session(segment: OrtSegment, *args: Any) -> Any:
        tell(way_of(segment))
        return by_session(segment, *args)

    def in_program(program: InductorProgram, *args: Any) -> Any:
        tell(PROGRAM)
        return by_program(program, *args)

    patch.setattr(OrtSegment, "__call__", in_session)
    patch.setattr(InductorProgram, "__call__", in_program)


def all_clusters_count(patch: pytest.MonkeyPatch) -> None:
    """Kernels are generated in models for clusters that save too little, too."""
    settings = generated_kernels.generator_settings
    patch.setattr(
        generated_kernels, "generator_settings", lambda of: replace(settings(of), least_saved_bytes=ANY_BYTES)
    )


def spy(patch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that notes who runs a segment, for each run."""
    ran: list[str] = []
    before_each_run(patch, ran.append)
    return ran


PROGRAM_TEXT = """
import math
import operator
import torch
from ort_accel.generated.description import Layout
from tests.generated.watched import PROGRAMS
{source}
def call(given):
    PROGRAMS.append({name!r})
    arguments = list(given)
    given.clear()
    return list(run(*arguments))
"""
"""A program that calls PyTorch's operators one by one."""

PROGRAMS: list[str] = []
"""The names of programs, for each run of one."""


class Compiler:
    """Stands for the process that compiles: makes kernels and programs in Python."""

    def __init__(self) -> None:
        self.kernels: dict[str, PythonKernel] = {}
        self.clusters: dict[str, Cluster] = {}
        self.program_text = PROGRAM_TEXT
        self.program_error = ""
        self.compiler_error = ""
        """An error that another start may not meet."""
        self.requests: list[list[str]] = []
        self.conditions: list[str] = []
        self.error: Exception | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(
        self, found: Mapping[str, Cluster | WholeGraph], sources: Path | None
    ) -> tuple[bytes, dict[str, Outcome]]:
        assert self.may_go_on.wait(60)
        self.requests.append(list(found))
        if self.error is not None:
            raise self.error
        return b"a library", {name: self._outcome(name, part) for name, part in found.items()}

    def _outcome(self, name: str, part: Cluster | WholeGraph) -> Outcome:
        if self.compiler_error:
            return Outcome(self.compiler_error, is_final=False)
        conditions = [text for text in self.conditions if set(re.findall(r"s\d", text)) <= set(part.hints)]
        if isinstance(part, Cluster):
            self.clusters[name] = part
            self.kernels[name] = PythonKernel(name, part)
            return Outcome("", conditions, 2.0, 1.0)
        text = self.program_text.format(source=part.source, name=name)
        return Outcome(self.program_error, conditions, wrapper=text)

    @property
    def calls(self) -> int:
        return sum(len(kernel.calls) for kernel in self.kernels.values())


class Clock:
    """Time passes only while segments run: for as long as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds: Callable[[str, int], float] = lambda way, run: 1.0
        self.counts = {CLUSTERS: 0, OPERATORS: 0, PROGRAM: 0}

    def perf_counter(self) -> float:
        return self.now

    def passes(self, way: str) -> None:
        """A segment runs in a way."""
        self.now += self.seconds(way, self.counts[way])
        self.counts[way] += 1


def function(x: Tensor, y: Tensor) -> Tensor:
    return torch.mm((x.sin() * y).exp(), y.t() * 0.5 + 1).tanh() * 2


def no(_: object) -> bool:
    return False


def fail(*_: object) -> Any:
    pytest.fail("it ran in PyTorch")


class Watched:
    """A function as a segment that goes over to generated kernels."""

    def __init__(self, run: Callable[..., Tensor] = function, **options: Any) -> None:
        self.function, self.is_transposed = run, False
        self.traced = Traced(run, (normal(12, 8), normal(12, 8)), "symbolic")
        self.report = options.pop("report", None) or Report()
        sessions = Sessions(SessionSettings(threads=2))
        self.generator = options.pop("generator", None) or Generator(
            sessions, OPSET, self.report, GeneratorSettings(**{"least_saved_bytes": ANY_BYTES, **options})
        )
        graph = self.traced.segment
        model = build(graph.body, graph.wanted, OPSET, graph.called)
        self.segment = OrtSegment(model, sessions, no, Fallback(fail, no), "test")
        self.run = self.generator.watch(self.segment, graph, no, "forward 0 part 0")
        self._arguments = Arguments(self.traced, model.given)

    def __call__(self, rows: int = 12, columns: int = 8) -> tuple[Sequence[Tensor], Tensor]:
        """Runs it once, and compares the result with PyTorch's. Returns inputs and result."""
        args = normal(rows, columns), normal(rows, columns) + 1
        if self.is_transposed:
            args = tuple(arg.t().contiguous().t() for arg in args)
        expected = self.function(*args)
        (found,) = self.run(*self._arguments(*args))
        torch.testing.assert_close(found, expected)
        return args, found

    def runs(self, count: int = MANY) -> None:
        """Compiles what is tried next, and runs it some times. Nothing is being compiled when it returns."""
        self()
        wait()
        for _ in range(count):
            self()
        wait()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*.{SUFFIX}"))
