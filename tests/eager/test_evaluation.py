"""When calls without gradients are compiled that a model gets beside its training."""

import copy

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.eager import evaluation
from ort_accel.reporting.report import State
from tests.against_eager import compilations, report, step

FEATURE = evaluation.FEATURE
COUNTER = "calls without gradients in eager mode"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def evaluated(model, calls=1):
    """Results for the same batch, and how many graphs they took."""
    x, before = torch.linspace(-1, 1, 24).view(4, 6), compilations(model)
    with torch.no_grad():
        results = [model(x) for _ in range(calls)]
    return results, compilations(model) - before


def trained(model, config=None):
    ort_accel.accelerate(model, config)
    step(model, torch.randn(4, 6))
    return model


def test_a_short_evaluation_beside_a_training_compiles_nothing(model):
    eager = copy.deepcopy(model)
    (found,), graphs = evaluated(trained(model))
    assert graphs == 0
    assert report(model).counters[COUNTER] == 1
    assert torch.equal(found, eager(torch.linspace(-1, 1, 24).view(4, 6)))
    feature = report(model).features[FEATURE]
    assert feature.state is State.OFF
    assert "so far, and compiling would take about" in feature.reason


def test_it_is_compiled_when_it_has_taken_as_long_as_that(model, monkeypatch):
    trained(model)
    seconds = iter(range(0, 1000, 7))
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: next(seconds))
    results, graphs = evaluated(model, 4)
    monkeypatch.undo()
    eager = report(model).counters[COUNTER]
    assert 0 < eager < 4
    assert graphs == 1
    assert report(model).features[FEATURE].state is State.APPLIED
    for result in results:
        torch.testing.assert_close(result, results[0])
    assert evaluated(model, 3)[1] == 0
    assert report(model).counters[COUNTER] == eager


def test_what_was_not_trained_is_compiled_at_once(model):
    ort_accel.accelerate(model)
    assert evaluated(model)[1] == 1


@pytest.mark.parametrize(
    "config",
    [
        {"engine": {"compile_evaluation": True}},
        {"engine": {"deterministic": True}},
        {"engine": {"fallback": "error"}},
        {"compute": {"placement": "onnxruntime"}},
        {"memory": {"level": 1}},
    ],
    ids=str,
)
def test_it_is_compiled_at_once_where_that_is_wished_or_time_may_not_decide(model, config):
    assert evaluated(trained(model, config))[1] == 1
    assert report(model).features[FEATURE].effect == "each is compiled at once"


def test_it_can_be_left_to_eager_mode(model):
    ort_accel.accelerate(model, {"engine": {"compile_evaluation": False}})
    assert evaluated(model, 3)[1] == 0
    assert report(model).counters[COUNTER] == 3
    step(model, torch.randn(4, 6))
    assert compilations(model) == 2, "forward and backward of the training"
    assert report(model).features[FEATURE].state is State.OFF
