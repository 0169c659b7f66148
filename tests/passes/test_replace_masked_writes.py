"""`x[mask] = value` divides no graph, whatever the value is, and gives eager's loss and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ort_accel
from tests.against_eager import assert_step_as_eager, pair, report


class Masked(nn.Module):
    """Replaces what a mask chooses of a layer's output by something, and reads both."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 3)
        self.learned, self.one = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor, rows: Tensor, cells: Tensor) -> Tensor:
        hidden = self.inner(x) * 2
        if self.kind == "vector":
            hidden[rows] = self.learned
        elif self.kind == "single":
            hidden[cells] = self.one
        elif self.kind == "number":
            hidden[rows] = 0.5
        elif self.kind == "integer":
            hidden[cells] = 2
        elif self.kind == "short":
            hidden[rows] = self.learned[:1]
        elif self.kind == "batch":
            hidden[rows[:, 0]] = self.learned
        else:  # each chosen position has a value of its own
            hidden[cells] = x[cells] * self.one
        return self.outer(hidden).square().mean()


def batch(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, length, 6)
    return x, torch.rand(rows, length) > 0.6, torch.rand(rows, length, 6) > 0.6


UNIFORM = ["vector", "single", "number", "integer", "short", "batch"]


@pytest.mark.parametrize("kind", UNIFORM)
def test_a_uniform_value_causes_no_graph_break(kind: str) -> None:
    eager, ours = pair(Masked(kind))
    for rows, length in [(2, 5), (3, 7), (2, 4)]:
        assert_step_as_eager(eager, ours, *batch(rows, length))
    assert {segment.graph.split()[0] for segment in report(ours).segments} == {"forward", "backward"}
    assert not [item for item in report(ours).fallbacks if "index_put" in item.op or item.op == "a graph break"]


def test_a_value_for_each_position_equals_eager_mode() -> None:
    eager, ours = pair(Masked("own"))
    for rows, length in [(2, 5), (3, 7)]:
        assert_step_as_eager(eager, ours, *batch(rows, length))


@pytest.mark.parametrize("chosen", [False, True])
def test_an_empty_or_full_mask_gives_the_gradients_of_eager_mode(chosen: bool) -> None:
    eager, ours = pair(Masked("vector"))
    x, rows, cells = batch(2, 5)
    assert_step_as_eager(eager, ours, x, torch.full_like(rows, chosen), cells)


def test_nan_at_unmasked_positions_does_not_reach_the_values_gradient() -> None:
    eager = Masked("vector")
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    x, rows, cells = batch(2, 5)
    x[~rows] = torch.inf
    for model in (eager, ours):
        model(x, rows, cells).backward()
    torch.testing.assert_close(ours.get_parameter("learned").grad, eager.learned.grad, equal_nan=True)
