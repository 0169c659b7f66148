"""What compiling leaves behind is given back at once and before the next step, and nothing between other steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.compiler import step_watchers


def given_back(monkeypatch: pytest.MonkeyPatch, keeps: bool, config: dict[str, object]) -> list[int]:
    """How often memory had been given back when each of several steps was over."""
    calls: list[None] = []
    monkeypatch.setattr(step_watchers, "disable_trimming", lambda: keeps)
    monkeypatch.setattr(step_watchers, "trim_heap", lambda: calls.append(None))
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    ort_accel.accelerate(model, {"observe": {"log_level": "error"}} | config)
    after = []
    for rows in (3, 3, 5, 5, 6, 6):  # the second length is compiled for all
        model(torch.randn(rows, 8)).sum().backward()
        after.append(len(calls))
    return after


@pytest.mark.parametrize("config", [{}, {"memory": {"budget": "1GiB"}}], ids=["as it comes", "a budget"])
def test_memory_is_returned_after_each_compilation_and_its_step(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    assert given_back(monkeypatch, keeps=True, config=config) == [1, 2, 3, 4, 4, 4]


def test_memory_that_the_c_library_does_not_keep_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_back(monkeypatch, keeps=False, config={}) == [0] * 6
