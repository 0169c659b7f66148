"""Training steps run on whichever is faster, the engine or eager PyTorch, and give eager's losses and gradients."""

import copy
import logging

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.compiler.module_call import Compiled
from ort_accel.config import load_config
from ort_accel.eager import comparison
from ort_accel.eager.comparison import why_not
from ort_accel.eager.step_clock import HostMoment
from ort_accel.reporting.timings import EAGER, KERNELS_READY, KERNELS_TRIED

FEATURE = comparison.FEATURE


ASKING = [
    {"engine": {"fallback": "error"}},
    {"engine": {"deterministic": True}},
    {"engine": {"compare_with_eager": False}},
    {"compute": {"placement": "onnxruntime"}},
    {"compute": {"tuning": {"enabled": True}}},
    {"memory": {"level": 1}},
    {"memory": {"budget": 0.8}},
    {"density": {"padding": True}},
    {"compute": {"loss_only": True}},
]


@pytest.mark.parametrize("wish", ASKING, ids=str)
def test_whoever_asks_for_the_engine_gets_it(wish):
    assert why_not(load_config({"version": 1, **wish}), True)
    assert not why_not(load_config({"version": 1}), True)
    assert why_not(load_config({"version": 1}), False)


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(16, width), nn.Dropout(0.3), nn.Linear(width, 4)

    def forward(self, x, labels=None):
        scores = self.last(self.drop(torch.tanh(self.first(x))))
        return nn.functional.cross_entropy(scores, labels)


def batch(step, rows=32):
    torch.manual_seed(step)
    return torch.randn(rows, 16), torch.randint(0, 4, (rows,))


def train(model, steps, rows=lambda step: 32):
    """Losses and the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x, labels = batch(step, rows(step))
        loss = model(x, labels=labels)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture
def steps_of_some_time(compared_with_eager, monkeypatch):
    """The test decides how long a step of either takes; no model is too small for the engine."""
    spent = {"engine": 0.005, "eager": 0.02}
    ran = []

    class Moment(HostMoment):
        now = 0.0

        def __init__(self):
            self._seconds = Moment.now

    on_engine = Compiled._on_engine

    def engine(compiled, leaves, args, kwargs):
        Moment.now += spent["engine"]
        ran.append("engine")
        return on_engine(compiled, leaves, args, kwargs)

    forward = Model.forward

    def eager(model, *args, **named):
        if not torch.compiler.is_compiling():
            Moment.now += spent["eager"]
            ran.append("eager")
        return forward(model, *args, **named)

    monkeypatch.setattr(comparison, "SMALL_FLOPS", 0)
    monkeypatch.setattr(comparison, "HostMoment", Moment)
    monkeypatch.setattr(Compiled, "_on_engine", engine)
    monkeypatch.setattr(Model, "forward", eager)
    return spent, ran


@pytest.mark.parametrize("engine_s", [0.005, 0.08])
def test_losses_and_gradients_are_eagers_whoever_runs_a_step(steps_of_some_time, caplog, engine_s):
    spent, ran = steps_of_some_time
    spent["engine"] = engine_s
    expected, found = Model(), Model()
    ours = ort_accel.accelerate(found, {"version": 1})
    with caplog.at_level(logging.INFO):
        got, gradients = train(ours, 40)
    comparison = ort_accel.report(ours).comparison
    assert comparison.runner == ("eager PyTorch" if engine_s > 0.02 else "ort_accel")
    assert str(comparison) in ort_accel.report(ours).features[FEATURE].effect
    assert [record.getMessage() for record in caplog.records].count(str(comparison)) <= 1
    assert any("times as long" in record.getMessage() for record in caplog.records)
    assert ("eager PyTorch runs" in str(ort_accel.report(ours))) is (engine_s > 0.02)
    assert {"eager", "engine"} == set(ran)
    ran.clear()
    losses, exact = train(expected, 40)
    assert got == pytest.approx(losses, rel=1e-5)
    for one, other in zip(gradients, exact, strict=True):
        torch.testing.assert_close(one, other)


def test_a_small_model_trains_in_eager_mode_until_compiling_pays(compared_with_eager, monkeypatch):
    monkeypatch.setattr(comparison, "COMPILE_S", 0.0)
    monkeypatch.setattr(comparison, "COMPILE_S_PER_LAYER", 0.0)
    ours = ort_accel.accelerate(Model(), {"version": 1})
    report = ort_accel.report(ours)
    train(ours, 1)
    assert not report.segments
    assert "small" in report.features[FEATURE].reason
    train(ours, 2)
    assert report.segments


def test_evaluations_of_a_small_model_are_not_compiled_before_its_steps_are(compared_with_eager):
    ours = ort_accel.accelerate(Model(), {"version": 1})
    train(ours, 2)
    with torch.no_grad():
        ours(*batch(0))
    assert not ort_accel.report(ours).segments


def test_no_eager_step_is_tried_where_memory_might_not_suffice(steps_of_some_time, monkeypatch):
    monkeypatch.setattr(comparison, "available_bytes", lambda: 1000)
    _, ran = steps_of_some_time
    ours = ort_accel.accelerate(Model(), {"version": 1})
    train(ours, 12)
    assert set(ran) == {"engine"}
    assert "GiB" in ort_accel.report(ours).features[FEATURE].reason


def test_while_generated_kernels_are_tried_the_engine_runs(steps_of_some_time):
    _, ran = steps_of_some_time
    ours = ort_accel.accelerate(Model(), {"version": 1})
    counters = ort_accel.report(ours).counters
    train(ours, 20)
    assert "eager" in ran
    counters[KERNELS_READY] += 2
    for _ in range(2):
        ran.clear()
        train(ours, comparison.SETTLED_STEPS + 8)
        assert set(ran) == {"engine"}
        counters[KERNELS_TRIED] += 1
    ran.clear()
    train(ours, comparison.SETTLED_STEPS + 8)
    assert "eager" in ran


@pytest.fixture
def eager_is_faster(steps_of_some_time, monkeypatch):
    """A model that trains in eager mode; who ran its steps, and how often the engine may try kernels."""
    monkeypatch.setattr(comparison, "TRIAL_COST_SHARE", 0.5)
    spent, ran = steps_of_some_time
    spent["engine"] = 0.08
    ours = ort_accel.accelerate(Model(), {"version": 1})
    train(ours, 10)
    found = ort_accel.report(ours).comparison
    assert found.runner == EAGER
    ran.clear()
    return ours, ran, 1 + int((found.ratio - 1) / comparison.TRIAL_COST_SHARE)


def test_where_eager_mode_is_faster_kernels_are_tried_in_single_steps(eager_is_faster):
    ours, ran, every = eager_is_faster
    counters = ort_accel.report(ours).counters
    counters[KERNELS_READY] += 1
    train(ours, 3 * every)
    assert ran == [*["eager"] * (every - 1), "engine"] * 3
    counters[KERNELS_TRIED] += 1
    ran.clear()
    train(ours, comparison.SETTLED_STEPS)
    assert set(ran) == {"engine"}, "it compares anew"


def test_a_trial_beside_eager_mode_that_does_not_end_is_not_waited_for(eager_is_faster, monkeypatch):
    ours, ran, every = eager_is_faster
    monkeypatch.setattr(comparison, "TRIAL_STEPS", 2)
    ort_accel.report(ours).counters[KERNELS_READY] += 1
    train(ours, 2 * every)
    assert ran.count("engine") == 2
    train(ours, 8)
    ran.clear()
    train(ours, 10)
    assert set(ran) == {"eager"}


def test_a_trial_of_kernels_that_does_not_end_is_not_waited_for(steps_of_some_time):
    """Their graph may never run again."""
    _, ran = steps_of_some_time
    ours = ort_accel.accelerate(Model(), {"version": 1})
    train(ours, 2)
    ort_accel.report(ours).counters[KERNELS_READY] += 1
    train(ours, 1)
    ran.clear()
    train(ours, comparison.TRIAL_STEPS - 2)
    assert set(ran) == {"engine"}
    train(ours, 8)
    assert "eager" in ran


def test_an_eager_step_without_memory_is_made_on_the_engine(steps_of_some_time, monkeypatch):
    _, ran = steps_of_some_time
    exact, _ = train(Model(), 12)
    inner = Model.forward

    def forward(model, *args, **named):
        if not torch.compiler.is_compiling():
            torch.rand(7)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return inner(model, *args, **named)

    monkeypatch.setattr(Model, "forward", forward)
    ran.clear()
    ours = ort_accel.accelerate(Model(), {"version": 1})
    got, _ = train(ours, 12)
    assert got == pytest.approx(exact, rel=1e-5)
    assert "does not suffice" in ort_accel.report(ours).features[FEATURE].reason


def test_a_deterministic_mode_that_begins_later_ends_the_turns(steps_of_some_time):
    _, ran = steps_of_some_time
    ours = ort_accel.accelerate(Model(), {"version": 1})
    train(ours, 5)
    ran.clear()
    torch.use_deterministic_algorithms(True)
    try:
        train(ours, 12)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(ran) == {"engine"}


def test_parameters_that_are_not_there_yet_do_not_count(compared_with_eager):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.LazyLinear(8), nn.Linear(8, 1)

        def forward(self, x):
            return self.last(self.first(x)).sum()

    ours = ort_accel.accelerate(Late(), {"version": 1})
    for _ in range(3):
        ours(torch.randn(4, 6)).backward()
    assert ours.first.weight.grad.shape == (8, 6)


def test_function_transforms_of_a_model_are_as_in_eager_mode(compared_with_eager):
    eager, (x, labels) = Model(), batch(0)
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"version": 1})
    found = []
    for model in (eager.eval(), ours.eval()):
        weights = dict(model.named_parameters())
        call = torch.func.grad(lambda weights, model=model: torch.func.functional_call(model, weights, (x, labels)))
        found.append(call(weights))
    torch.testing.assert_close(found[1], found[0])


def test_calls_without_a_backward_end_the_comparison(steps_of_some_time):
    _, ran = steps_of_some_time
    ours = ort_accel.accelerate(Model(), {"version": 1})
    x, labels = batch(0, 2)
    for _ in range(comparison.MOST_CALLS + 2):
        ours(x, labels=labels)
    assert "no backward" in ort_accel.report(ours).features[FEATURE].reason
    assert ran[-1] == "engine"


def test_several_calls_before_one_backward_are_one_step(steps_of_some_time):
    """As a trainer has it that compares a chosen with a rejected answer."""
    _, ran = steps_of_some_time
    ours = ort_accel.accelerate(Model(), {"version": 1})
    for step in range(14):
        x, labels = batch(step)
        (ours(x, labels=labels) + ours(x, labels=labels.roll(1))).backward()
    calls = [who for who in ran if who in ("engine", "eager")]
    assert "eager" in calls
    assert all(one == other for one, other in zip(calls[::2], calls[1::2], strict=True))
    assert ort_accel.report(ours).comparison is not None


def test_a_copy_of_the_model_is_untouched(steps_of_some_time):
    model = Model()
    plain = copy.deepcopy(model)
    train(ort_accel.accelerate(model, {"version": 1}), 3)
    assert plain._compiled_call_impl is None


def test_a_backward_that_fails_does_not_end_the_comparison(steps_of_some_time):
    ours = ort_accel.accelerate(Model(), {"version": 1})
    train(ours, 12)
    x, labels = batch(0, 4)
    loss = ours(x, labels=labels)
    hook = next(ours.parameters()).register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    train(ours, 70)
    assert str(ort_accel.report(ours).comparison) in ort_accel.report(ours).features[FEATURE].effect
