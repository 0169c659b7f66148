"""Copies that nobody needs are left out; no bit of a result changes."""

from __future__ import annotations

import copy

import pytest
import torch
from packaging.version import Version
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ort_accel
from ort_accel.passes.options import PassOptions
from ort_accel.passes.remove_clones import CLONE, remove_clones
from tests.against_eager import assert_step_as_eager

X = torch.tensor([[0.1, -0.0, float("nan")], [float("inf"), 1e-40, 3.0]])


def copies(module: fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=CLONE))


def left_after(function) -> int:
    """How many copies are left; the results are the same bits, and lie in memory of their own as before."""
    module = make_fx(function, tracing_mode="fake")(X)
    before = copies(module)
    assert remove_clones(module.graph, PassOptions()) == before - copies(module)
    module.graph.lint()
    module.recompile()
    given, expected = X.clone(), X.clone()
    results, wanted = module(given), function(expected)
    torch.testing.assert_close([given, *results], [expected, *wanted], rtol=0, atol=0, equal_nan=True)
    assert len({item.data_ptr() for item in results}) == len({item.data_ptr() for item in wanted})
    return copies(module)


def test_clones_that_are_only_read_are_removed():
    assert left_after(lambda x: [x.sin().clone().cos(), x.exp().t().clone().unsqueeze(0).cos()]) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x.clone().cos()],
        lambda x: [x.t().clone().cos()],
        lambda x: [x.sin().t().clone(memory_format=torch.contiguous_format).cos()],
        lambda x: [x.sin()[:, :1].expand(2, 3).clone().cos()],
        lambda x: [y := x.sin(), y.clone().cos()],
        lambda x: [y := x.sin().clone(), y.cos()],
        lambda x: [(y := x.sin().clone()).t(), y.cos()],
        lambda x: [(y := x.sin()).clone().cos(), y.add_(1)],
        lambda x: [(y := x.sin()).clone().add_(1).cos(), y.cos()],
    ],
    ids=["input", "look at an input", "other order", "spread", "source returned", "returned", "look returned",
         "source changed", "changed"],
)  # fmt: skip
def test_clones_that_make_a_difference_stay(function):
    assert left_after(function) == 1


class Dropping(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(probability)

    def forward(self, x):
        return self.second(self.dropout(self.first(x).tanh())).sum()


CAPTURES_CLONES = Version(torch.__version__) < Version("2.14")
"""True where a dropout with probability zero is captured as a clone."""


@pytest.mark.parametrize(("probability", "count"), [(0.0, int(CAPTURES_CLONES)), (0.1, 0)])
def test_the_clone_of_a_dropout_with_probability_zero_is_removed(probability, count):
    eager = Dropping(probability)
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"observe": {"log_level": "error"}})
    assert_step_as_eager(eager, ours, torch.randn(4, 8))
    assert ort_accel.report(ours).counters["copies left out"] == count
    segments = ort_accel.report(ours).segments
    assert segments
    assert not any("aten.clone" in name for segment in segments for name in segment.ops)
