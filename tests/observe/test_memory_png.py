"""The plots of memory as a picture: there where a step was predicted, and an error with words where it cannot be."""

import sys

import pytest

from ort_accel.errors import OrtAccelError
from ort_accel.observe.report_file import save_report
from ort_accel.reporting.memory import GraphMemory, MeasuredPeak, MemoryStage, Peak
from ort_accel.reporting.report import Report


def predicted():
    report = Report()
    stages = [
        MemoryStage(phase, {"parameters": 2**20, "kept: layer 1": size})
        for phase, size in (("forward", 2**21), ("backward", 2**20), ("optimizer", 0))
    ]
    frontier = [Peak(4 * 2**20, 2**20, 0.0), Peak(3 * 2**20, 2**20, 1.5)]
    report.memory["graph 0"] = GraphMemory("graph 0", "auto", frontier=frontier, stages=stages)
    report.measured_peak = MeasuredPeak(2, 2**20, 2**21, 2**20)
    return report


def test_a_step_and_its_frontier_are_drawn_one_below_the_other(tmp_path):
    pytest.importorskip("matplotlib")
    file, smaller = tmp_path / "memory.png", tmp_path / "step.png"
    report = predicted()
    save_report(report, file)
    report.memory["graph 0"].frontier.pop()
    save_report(report, smaller)
    (width, height), (same, half) = map(size_of, (file, smaller))
    assert (width, height) == (same, 2 * half)


def size_of(file):
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


def test_without_a_prediction_there_is_nothing_to_draw(tmp_path):
    with pytest.raises(OrtAccelError, match=r"set memory\.budget or observe\.memory_stats"):
        save_report(Report(), tmp_path / "memory.png")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OrtAccelError, match=r"`pip install matplotlib`"):
        save_report(predicted(), tmp_path / "memory.png")
