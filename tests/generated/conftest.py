"""Fixtures for segments that go over to generated code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from packaging.version import Version

from ort_accel.compiler import generated_kernels
from ort_accel.generated import program, takeover, trial
from ort_accel.generated.builds import OLDEST_TORCH
from ort_accel.generated.trial import PROGRAM
from ort_accel.generated.worker import Outcome
from tests.generated.watched import Clock, Compiler, all_clusters_count, before_each_run, spy, wait

if Version(torch.__version__) < OLDEST_TORCH:  # nothing is generated there
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who ran a segment, for each run."""
    return spy(monkeypatch)


@pytest.fixture
def kernels_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels go on, however long they take."""
    monkeypatch.setattr(trial, "LEAST_GAIN", float("inf"))
    monkeypatch.setattr(Outcome, "is_faster", property(lambda outcome: not outcome.error))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Kernels are in Python, clusters count that save nothing, and models try no programs."""
    found = Compiler()
    monkeypatch.setattr(takeover, "compile_parts", found)
    monkeypatch.setattr(takeover, "load_kernels", lambda library, names: None)
    monkeypatch.setattr(program, "load_library", lambda library: None)
    monkeypatch.delitem(generated_kernels.DELAY_SECONDS, PROGRAM)
    all_clusters_count(monkeypatch)
    yield found
    found.may_go_on.set()
    wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(trial, "time", found)
    before_each_run(monkeypatch, found.passes)
    return found
