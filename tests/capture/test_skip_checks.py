"""With `engine.skip_checks` a call like an earlier one is not checked again, but for what the call itself shows."""

import pytest
import torch
from torch import nn

import ort_accel


def accelerated(skip_checks=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    return ort_accel.accelerate(model, {"engine": {"skip_checks": skip_checks, "compile_evaluation": True}})


def step(model, rows=3):
    model.zero_grad()
    model(torch.ones(rows, 4)).sum().backward()
    return model[0].weight.grad


def without_checks(model):
    return ort_accel.report(model).counters["calls without checks"]


@pytest.mark.parametrize("skip_checks", [False, True])
def test_a_parameter_that_freezes_later_is_seen_only_with_checks(skip_checks):
    model = accelerated(skip_checks)
    for _ in range(4):
        step(model)
    model[0].weight.requires_grad_(False)
    before = ort_accel.report(model).counters["compilations"]
    step(model)
    assert (ort_accel.report(model).counters["compilations"] > before) is not skip_checks
    assert (without_checks(model) > 0) is skip_checks


def test_sizes_modes_and_gradients_are_still_seen():
    model, plain = accelerated(), ort_accel.restore(accelerated())
    calls = [(3, True), (3, True), (5, True), (7, True), (3, False), (5, False), (3, True), (7, False)] * 3
    for rows, training in calls:
        for each in (model, plain):
            each.train(training)
        torch.manual_seed(rows)
        expected = step(plain, rows)
        torch.manual_seed(rows)
        torch.testing.assert_close(step(model, rows), expected)
        with torch.no_grad():
            assert not model(torch.ones(rows, 4)).requires_grad
    assert without_checks(model) > len(calls)


def test_autocast_is_still_seen():
    model, plain = accelerated(), ort_accel.restore(accelerated())
    model.eval(), plain.eval()
    for enabled in (False, False, False, True, False, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.no_grad():
            got, expected = model(torch.ones(3, 4)), plain(torch.ones(3, 4))
        assert got.dtype is expected.dtype
    assert without_checks(model) > 0


def test_an_input_that_asks_for_a_gradient_gets_it():
    model, plain = accelerated(), ort_accel.restore(accelerated())
    model.eval(), plain.eval()
    for asks in (False, False, False, True, False, True):
        inputs = [torch.ones(3, 4, requires_grad=asks) for _ in range(2)]
        for each, given in zip((model, plain), inputs, strict=True):
            each(given).sum().backward()
        assert (inputs[0].grad is not None) is asks
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert without_checks(model) > 0


def test_a_wish_for_eager_mode_stands():
    model = accelerated()
    for _ in range(4):
        step(model)
    torch.manual_seed(1)
    with torch.compiler.set_stance("force_eager"):
        got = step(model)
    torch.manual_seed(1)
    torch.testing.assert_close(got, step(ort_accel.restore(model)), rtol=0, atol=0)
