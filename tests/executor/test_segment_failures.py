"""A failure while a graph is compiled is reported with the line of the model's code, and PyTorch runs the segment."""

from pathlib import Path

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.eager.fallback import FallbackError
from ort_accel.executor import build_model
from ort_accel.lowering.registry import lowerings
from ort_accel.native.library import native_library
from ort_accel.partition import assign
from ort_accel.reporting.fallbacks import Reason
from ort_accel.runtime.session import Session
from ort_accel.runtime.sessions import Sessions


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        return hidden.square().sum()


class Normed(nn.Module):
    """The session of its backward calls a kernel."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.inner(x)).pow(3).sum()


def step(model, x):
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return loss.detach(), *(parameter.grad for parameter in model.parameters())


@pytest.fixture
def no_sessions(monkeypatch):
    def refuse(self, *_):
        raise RuntimeError("no more room for models\nand a second line")

    monkeypatch.setattr(Sessions, "create", refuse)


@pytest.fixture
def no_tanh(monkeypatch):
    """Let a node pass its trial, and fail when its segment is built."""
    true_lower = build_model.lower

    def lower(graph, target, *rest):
        if target is torch.ops.aten.tanh.default:
            raise ValueError("no curve today")
        return true_lower(graph, target, *rest)

    monkeypatch.setattr(build_model, "lower", lower)


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(n for n, line in enumerate(lines, 1) if text in line)}: "


@pytest.mark.usefixtures("no_sessions")
def test_a_session_that_cannot_be_made_leaves_its_part_to_pytorch():
    model = Small()
    x = torch.randn(3, 4)
    expected = step(model, x)
    got = step(ort_accel.accelerate(model, {"engine": {"fallback": "report"}}), x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    report = ort_accel.report(model)
    assert {segment.runner for segment in report.segments} == {"pytorch"}
    failed = {item.op: item for item in report.fallbacks if item.reason is Reason.FAILED}
    assert failed["aten.tanh.default"].detail == "when it was compiled: no more room for models"
    assert failed["aten.tanh.default"].where.startswith(line_of("hidden = torch.tanh") + "hidden = torch.tanh")
    assert failed["aten.tanh_backward.default"].where == failed["aten.tanh.default"].where


@pytest.mark.usefixtures("no_tanh")
def test_an_operator_that_cannot_be_written_is_named_with_its_sizes():
    model = ort_accel.accelerate(Small(), {"engine": {"fallback": "error"}})
    with pytest.raises(FallbackError) as caught:
        model(torch.randn(3, 4))
    said = str(caught.value)
    assert "aten.tanh.default(float32 [3, 6]): no curve today" in said
    assert f"first at {line_of('hidden = torch.tanh')}" in said
    assert "Set engine.fallback to warn or report" in said


@pytest.mark.skipif(native_library() is None, reason="the native library was not built")
def test_an_operator_that_a_session_calls_is_not_a_fallback(monkeypatch):
    """The session calls PyTorch's kernel, so the graph is not cut and `engine.fallback: error` accepts it."""
    known = {target: each for target, each in lowerings().items() if target is not torch.ops.aten.tanh.default}
    monkeypatch.setattr(assign, "lowerings", lambda: known)
    model = Small()
    x = torch.randn(3, 4)
    expected = step(model, x)
    torch.testing.assert_close(step(ort_accel.accelerate(model, {"engine": {"fallback": "error"}}), x), expected)
    report = ort_accel.report(model)
    assert {segment.runner for segment in report.segments} == {"onnxruntime"}
    (tanh,) = (item for item in report.fallbacks if item.op == "aten.tanh.default")
    assert (tanh.reason, tanh.is_called, tanh.is_forced) == (Reason.UNSUPPORTED_OP, True, False)
    (shown,) = (line for line in str(report).splitlines() if "aten.tanh.default" in line)
    assert shown.split()[:2] == ["1", "aten.tanh.default:"]


@pytest.mark.usefixtures("no_tanh")
def test_the_model_trains_on_around_it():
    model = Small()
    x = torch.randn(3, 4)
    expected = step(model, x)
    torch.testing.assert_close(step(ort_accel.accelerate(model, {"engine": {"fallback": "report"}}), x), expected)
    assert any(segment.runner == "onnxruntime" for segment in ort_accel.report(model).segments)


@pytest.mark.parametrize("is_late", [False, True], ids=["before a call has run", "after the calls have run"])
def test_a_backward_that_fails_in_a_later_step(is_late, monkeypatch):
    """PyTorch repeats it while its inputs are there. They are gone once the last call that reads them has run."""
    model = Normed()
    x = torch.randn(3, 4)
    expected = step(model, x)
    ort_accel.accelerate(model, {"engine": {"fallback": "report", "compare_with_eager": False}})
    step(model, x)
    loss, run = model(x), Session.__call__

    def fail(self, feeds):
        if is_late:
            run(self, feeds)
        raise RuntimeError("no memory left for a tensor")

    monkeypatch.setattr(Session, "__call__", fail)
    model.zero_grad()
    if is_late:
        with pytest.raises(RuntimeError, match="a backward failed in ONNX Runtime: no memory left for a tensor"):
            loss.backward()
        return
    loss.backward()
    torch.testing.assert_close((loss.detach(), *(parameter.grad for parameter in model.parameters())), expected)
    assert any(item.reason is Reason.FAILED for item in ort_accel.report(model).fallbacks)
