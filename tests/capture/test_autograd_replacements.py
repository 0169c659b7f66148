"""Functions with a backward of their own that the engine captures as operators, where these suit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ort_accel.capture import autograd_replacements
from ort_accel.capture.autograd_replacements import Replacement, capture_as_operators
from tests.against_eager import assert_step_as_eager, compilations, pair, report

ASKED: list[list[Any]] = []


class Doubled(torch.autograd.Function):
    """Twice its input, by way of memory that Dynamo cannot follow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float, nothing: None = None) -> Tensor:
        made = torch.empty(len(x), 2 * x.shape[1])[:, ::2]
        torch.mul(x, times, out=made)
        ctx.times = times
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient * ctx.times, None, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Doubled.apply(self.inner(x), 2.0, None)
        return self.outer(doubled).square().mean()


def operators(x: Tensor, times: float, nothing: None = None) -> Tensor:
    return x * times


def small(arguments: Any) -> bool:
    ASKED.append(list(arguments))
    return bool(arguments[0].shape[0] < 10)


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_replacements, "_REPLACEMENTS", {})
    capture_as_operators(Doubled, Replacement(operators, small))
    ASKED.clear()


def breaks(model: nn.Module) -> int:
    return sum(item.op == "a graph break" for item in report(model).fallbacks)


def test_it_is_in_the_graph_as_operators() -> None:
    eager, ours = pair(Model())
    for rows in (3, 4, 5, 3):
        assert_step_as_eager(eager, ours, torch.randn(rows, 6))
    assert not breaks(ours)
    assert compilations(ours) <= 4
    assert [type(item) for item in ASKED[0][1:]] == [float, type(None)]


def test_where_operators_do_not_suit_it_runs_as_it_is() -> None:
    eager, ours = pair(Model())
    for rows in (20, 4, 30, 3):  # those of fewer rows are captured anew
        assert_step_as_eager(eager, ours, torch.randn(rows, 6))
    assert breaks(ours)


def test_other_compilers_see_the_function() -> None:
    torch.compile(Model(), backend="eager")(torch.randn(3, 6))
    assert not ASKED
