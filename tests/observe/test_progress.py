"""While a model is set up there is a line about it; after its first step one line says who runs it, or a table."""

import io
import logging
import re
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.compiler.backend import Backend
from ort_accel.executor.ort_segment import OrtSegment
from ort_accel.observe import progress
from ort_accel.observe.headline import headline
from ort_accel.observe.progress import Progress
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report

LINE = "100 % of the work on ONNX Runtime"
HEADINGS = "run by ONNX Runtime"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """Within a test only: pytest sets the standard error anew between fixtures and test."""
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "STATUS_DELAY_SECONDS", 0.05)
    return screen


def wait_for(text, screen):
    """A busy machine may take a while to show it."""
    end = time.monotonic() + 60
    while text not in screen.getvalue() and time.monotonic() < end:
        time.sleep(0.05)


def trained(log_level, steps=2):
    model = ort_accel.accelerate(nn.Linear(3, 2), {"observe": {"log_level": log_level}})
    for _ in range(steps):
        model(torch.randn(4, 3)).sum().backward()
    return model


def said(caplog):
    """What the package has logged."""
    return [record.getMessage() for record in caplog.records if record.name == "ort_accel"]


def test_the_table_is_shown_once_at_info_when_the_second_step_begins(capsys):
    model = trained("info", steps=1)
    assert HEADINGS not in capsys.readouterr().err
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
    shown = capsys.readouterr()
    assert shown.err.count(HEADINGS) == shown.err.count(LINE) == 1
    assert "memory.budget" in shown.err  # what is off, too
    assert shown.out == ""


def test_at_the_default_level_a_model_is_one_line_in_the_log_and_no_warning(capsys, caplog):
    model = trained("warning", steps=1)
    assert said(caplog) == []
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
    assert said(caplog) == [headline(ort_accel.report(model))]
    assert said(caplog)[0].startswith(f"{LINE}, set up in ")
    assert {record.levelno for record in caplog.records if record.name == "ort_accel"} == {logging.INFO}
    assert capsys.readouterr().err == ""


def test_the_line_has_no_level_where_the_program_has_not_set_up_logging():
    """Nor has the root logger, which onnxruntime-training would give a handler."""
    code = (
        "import logging, torch, ort_accel\n"
        "model = ort_accel.accelerate(torch.nn.Linear(3, 2), {'engine': {'compare_with_eager': False}})\n"
        "for _ in range(3): model(torch.randn(4, 3)).sum().backward()\n"
        "print(logging.getLogger().handlers)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.search(rf"^ort_accel: {LINE}, set up in [\d.]+ s; details: print\(", done.stderr, re.MULTILINE)
    assert done.stdout == "[]\n"


def test_its_counts_are_those_of_the_model(capsys):
    report = ort_accel.report(trained("info"))
    nodes = sum(segment.nodes for segment in report.segments)
    assert f" of {nodes} " in capsys.readouterr().err
    assert nodes == report.segments[0].nodes + sum(segment.nodes for segment in report.segments[1:]) > 0


@pytest.mark.parametrize("log_level", ["error", "fatal"])
def test_quieter_levels_show_nothing(log_level, capsys, caplog):
    trained(log_level)
    assert LINE not in capsys.readouterr().err + caplog.text


def test_other_ranks_show_nothing(capsys, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    trained("warning")
    assert LINE not in capsys.readouterr().err + caplog.text


def left_to_pytorch(**engine):
    """A model whose products PyTorch runs."""
    config = {"compute": {"native": False}, "engine": {"run_in_pytorch": ["aten.addmm", "aten.mm"], **engine}}
    model = ort_accel.accelerate(nn.Linear(3, 2), config)
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
    return model


def test_where_pytorch_runs_it_all_the_line_says_so_and_why(caplog):
    left_to_pytorch()
    start = f"PyTorch runs all of the work (mostly {Reason.WISH}), ONNX Runtime 0 %, set up in "
    assert said(caplog)[-1].startswith(start)


def test_set_up_is_as_long_as_the_call_that_compiles():
    model = ort_accel.accelerate(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), {"observe": {"log_level": "error"}})
    begin = time.perf_counter()
    model(torch.randn(4, 3))
    took = time.perf_counter() - begin
    report = ort_accel.report(model)
    assert report.timings["trace and first run"] > 0
    assert 0.5 * took < report.set_up_seconds <= took
    known = report.set_up_seconds
    model(torch.randn(4, 3))
    assert report.set_up_seconds == known


def test_a_segment_that_onnx_runtime_fails_at_counts_for_pytorch_until_it_goes_well(monkeypatch):
    model = trained("error", steps=1)
    before = ort_accel.report(model).work

    def fail(*_):
        raise RuntimeError("no kernel any more")

    with monkeypatch.context() as failing:
        failing.setattr(OrtSegment, "_by_onnx_runtime", fail)
        model(torch.randn(4, 3)).sum().backward()
    assert before[0] == before[1] > 0
    assert ort_accel.report(model).work == (0, before[1])
    model(torch.randn(4, 3)).sum().backward()
    assert ort_accel.report(model).work == before


def test_a_model_that_cannot_be_compiled_is_said_to_run_in_pytorch(caplog, monkeypatch):
    def fail(*_, **__):
        raise IndexError("no such node")

    monkeypatch.setattr(Backend, "_compile", fail)
    trained("warning", steps=3)
    warning, line = said(caplog)
    assert "no such node" in warning
    assert line.startswith("PyTorch runs this model, and no graph of it was compiled (mostly failed to compile)")


def test_info_logs_each_phase_of_each_graph(caplog):
    caplog.set_level(logging.INFO, "ort_accel")
    trained("info", steps=1)
    assert {"capture", "forward 0: assign operators", "backward 0: build sessions"} <= set(caplog.messages)


def test_a_terminal_shows_a_line_when_it_takes_long_and_takes_it_away_again(monkeypatch):
    screen, report = terminal(monkeypatch), Report()
    Progress(report, "warning")
    with report.timed("capture"), report.timed("build sessions", "forward 3"):
        wait_for("forward 3: build sessions", screen)
    shown = screen.getvalue()
    assert "forward 3: build sessions" in shown
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))


def test_the_line_tells_how_long_it_has_taken(monkeypatch):
    screen, report = terminal(monkeypatch), Report()
    Progress(report, "warning")
    with report.timed("capture"):
        wait_for("capture, 1 s", screen)
        wait_for("capture, 2 s", screen)
    assert "capture, 0 s" in screen.getvalue()
    assert "capture, 2 s" in screen.getvalue()


def test_log_lines_stand_above_the_line_whoever_writes_them(monkeypatch):
    screen, report = terminal(monkeypatch), Report()
    theirs, own = logging.getLogger("a.library"), logging.StreamHandler(screen)  # made before, holds the terminal
    theirs.addHandler(own)
    try:
        Progress(report, "warning")
        with report.timed("capture"):
            wait_for("capture", screen)
            theirs.warning("a word of theirs")
            print("a word of the script's", file=sys.stderr)
            wait_for("script's", screen)
    finally:
        theirs.removeHandler(own)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", screen.getvalue().replace("\x1b[2K", "\n")).splitlines()
    assert {"a word of theirs", "a word of the script's"} <= {line.strip() for line in shown}
    assert own.stream is screen


def test_a_terminal_shows_nothing_when_it_is_quick(monkeypatch):
    screen, report = terminal(monkeypatch), Report()
    monkeypatch.setattr(progress, "STATUS_DELAY_SECONDS", 1.0)
    Progress(report, "warning")
    with report.timed("capture"):
        pass
    time.sleep(1.2)
    assert screen.getvalue() == ""


def test_the_line_goes_away_when_the_work_fails(monkeypatch):
    screen, report = terminal(monkeypatch), Report()
    Progress(report, "warning")

    def failing():
        with report.timed("capture"):
            wait_for("capture", screen)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    shown = screen.getvalue()
    time.sleep(0.3)
    assert "capture" in shown
    assert screen.getvalue() == shown
