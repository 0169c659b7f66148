"""Tensors are handed over, not copied: both sides look at the same addresses."""

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.runtime import session


@pytest.fixture
def results(monkeypatch):
    """The addresses of what ONNX Runtime gives back, as it knows them and as torch sees them."""
    seen: list[tuple[int, int]] = []
    take = session.to_torch

    def taken(values, count):
        tensors = take(values, count)
        seen.extend((value.data_ptr(), tensor.data_ptr()) for value, tensor in zip(values, tensors, strict=True))
        return tensors

    monkeypatch.setattr(session, "to_torch", taken)
    return seen


def test_outputs_and_gradients_are_the_memory_that_onnx_runtime_wrote(results):
    model = ort_accel.accelerate(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    out = model(torch.randn(32, 64))
    given = {ours for ours, _ in results}
    assert out.data_ptr() in given
    results.clear()
    out.backward(torch.ones_like(out))
    assert results
    assert all(theirs == ours for ours, theirs in results)
    given = {ours for ours, _ in results}
    assert all(parameter.grad.data_ptr() in given for parameter in model.parameters())


def test_what_is_handed_over_outlives_the_run(results):
    model = ort_accel.accelerate(nn.Linear(64, 64)).eval()
    with torch.no_grad():
        xs = [torch.randn(32, 64) for _ in range(5)]
        kept = [model(x) for x in xs]
        for x, out in zip(xs, kept, strict=True):
            torch.testing.assert_close(out, model(x))
    assert len({out.data_ptr() for out in kept}) == 5
