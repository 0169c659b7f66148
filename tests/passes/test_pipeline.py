"""The one list of graph passes: it has every pass, and the report counts how often each applied."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel import passes
from ort_accel.passes.options import PassOptions
from ort_accel.passes.pipeline import PASSES, Pass, Stage, run_passes
from ort_accel.reporting.report import Report

NO_PASS = {"__init__", "common", "options", "pipeline"}


def cloned() -> fx.Graph:
    return make_fx(lambda x: x.sin().clone().cos(), tracing_mode="fake")(torch.ones(2)).graph


def test_every_file_of_the_folder_is_a_pass_of_the_list() -> None:
    files = {path.stem for path in Path(*passes.__path__).glob("*.py")} - NO_PASS
    assert sorted(item.name for item in PASSES) == sorted(files)


@pytest.mark.parametrize("item", PASSES, ids=lambda item: item.name)
def test_a_pass_takes_a_graph_and_options_and_returns_a_count(item: Pass) -> None:
    signature = inspect.signature(item.run)
    assert [value.annotation for value in signature.parameters.values()] == ["fx.Graph", "PassOptions"]
    assert signature.return_annotation == "int"


def test_the_report_counts_applications() -> None:
    report = Report()
    for _ in range(2):
        run_passes(cloned(), Stage.JOINT, PassOptions(), report)
    assert report.counters == {"copies left out": 2}


def test_a_pass_runs_at_its_stages_only() -> None:
    report = Report()
    run_passes(cloned(), Stage.SEGMENTS, PassOptions(), report)
    assert not report.counters


def test_a_switch_turns_its_passes_off() -> None:
    report = Report()
    run_passes(cloned(), Stage.JOINT, PassOptions(fusions=False), report)
    assert not report.counters
