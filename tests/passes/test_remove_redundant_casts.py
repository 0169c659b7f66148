"""Casts that are repeated or undone are left out; no bit of a result changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ort_accel
from ort_accel.passes.common import CAST
from ort_accel.passes.options import PassOptions
from ort_accel.passes.remove_redundant_casts import remove_redundant_casts

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def traced(function, *inputs) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def casts(module: fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=CAST))


def left_after(function, *inputs) -> int:
    """How many casts are left; the results are the same bits."""
    module = traced(function, *inputs)
    before = casts(module)
    count = remove_redundant_casts(module.graph, PassOptions())
    module.graph.lint()
    module.recompile()
    given, expected = module(*(item.clone() for item in inputs)), function(*(item.clone() for item in inputs))
    torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
    assert count <= before
    return casts(module)


X = torch.tensor([[0.1, -0.0, float("nan")], [float("inf"), 1e-40, 3.0]])


def test_a_tensor_is_cast_to_a_dtype_once():
    assert left_after(lambda x: [x.to(BF16).sin(), x.to(BF16).cos(), x.to(F16).exp()], X) == 2


@pytest.mark.parametrize(("narrow", "wide"), [(BF16, F32), (F16, F32), (F32, F64), (BF16, F64)])
def test_a_cast_to_a_wider_dtype_and_back_is_removed(narrow, wide):
    assert left_after(lambda x: x.to(wide).to(narrow).sin(), X.to(narrow)) == 0


def test_a_round_trip_with_views_between_is_removed():
    def function(x):
        return x.to(F32).t().unsqueeze(0).to(BF16).sin()

    assert left_after(function, X.to(BF16)) == 0


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda x: x.to(BF16).to(F32).sin(), X),
        (lambda x: x.to(F16).to(BF16).sin(), X.to(BF16)),
        (lambda x: x.to(F32).to(F16).sin(), X.to(BF16)),
        (lambda x: x.to(F32).exp().to(BF16).sin(), X.to(BF16)),
    ],
    ids=["narrower and back", "through another narrow type", "into a third type", "work between"],
)
def test_casts_that_round_stay(function, given):
    assert left_after(function, given) == 2


def test_results_do_not_share_memory():
    module = traced(lambda x: [x.to(BF16), x.to(BF16), x.to(F32).to(F32)], X)
    remove_redundant_casts(module.graph, PassOptions())
    module.recompile()
    results = module(X)
    assert len({result.data_ptr() for result in results}) == 3


def test_a_tensor_that_is_mutated_is_cast_twice():
    def function(x):
        before = x.to(BF16).sin()
        x.mul_(2)
        return before + x.to(BF16).cos()

    assert left_after(function, X) == 2


class Readers(nn.Module):
    """Three products of one input, as of queries, keys and values; their gradients come from one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        normal = self.norm(x)
        return sum(layer(normal).float() for layer in self.layers).square().mean()


@pytest.mark.parametrize("level", [0, 1])
def test_a_step_equals_eager_mode_with_fewer_casts(level):
    torch.manual_seed(0)
    eager = Readers()
    wish = {"engine": {"fallback": "report"}, "precision": {"cast_propagation": {"level": level}}}
    ours = ort_accel.accelerate(copy.deepcopy(eager), wish)
    gradients = []
    for model in (eager, ours):
        with torch.autocast("cpu", BF16):
            loss = model(torch.linspace(-1, 1, 40).reshape(5, 8))
        loss.backward()
        gradients.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    report = ort_accel.report(ours)
    assert report.counters["casts left out"] == 4 * level  # two in either direction
    assert report.features["precision.cast_propagation.level"].state.value == ("applied" if level else "off")
