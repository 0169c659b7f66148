"""While a model is set up there is a line about it; after its first step the table is shown, once."""

import io
import logging
import time

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.observe import progress
from ort_accel.observe.progress import Progress
from ort_accel.reporting import Report

TITLE = "this model runs on ONNX Runtime"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """Within a test only: pytest sets the standard error anew between fixtures and test."""
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
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


@pytest.mark.parametrize("log_level", ["info", "warning"])
def test_the_table_is_shown_once_when_the_second_step_begins(log_level, capsys):
    model = trained(log_level, steps=1)
    assert TITLE not in capsys.readouterr().err
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
    shown = capsys.readouterr()
    assert shown.err.count(TITLE) == 1
    assert shown.out == ""


def test_its_counts_are_those_of_the_model(capsys):
    report = ort_accel.report(trained("warning"))
    nodes = sum(segment.nodes for segment in report.segments)
    assert f" of {nodes} " in capsys.readouterr().err
    assert nodes == report.segments[0].nodes + sum(segment.nodes for segment in report.segments[1:]) > 0


def test_info_lists_what_is_off_and_warning_only_counts_it(capsys):
    trained("info")
    assert "memory.budget" in capsys.readouterr().err
    trained("warning")
    assert "memory.budget" not in capsys.readouterr().err


@pytest.mark.parametrize("log_level", ["error", "fatal"])
def test_quieter_levels_show_no_table(log_level, capsys):
    trained(log_level)
    assert TITLE not in capsys.readouterr().err


def test_other_ranks_show_no_table(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    trained("warning")
    assert TITLE not in capsys.readouterr().err


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


def test_a_terminal_shows_nothing_when_it_is_quick(monkeypatch):
    screen, report = terminal(monkeypatch), Report()
    monkeypatch.setattr(progress, "PATIENCE", 1.0)
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
