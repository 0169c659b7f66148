"""A dropout whose mask is saved as bits is applied as bits, with eager's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import ort_accel

NAME = "dropouts applied as bits"


class Dropped(nn.Module):
    def __init__(self, probability: float = 0.3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 256), nn.Linear(256, 64)
        self.probability = probability

    def forward(self, x):
        hidden = functional.dropout(self.first(x).relu(), self.probability, self.training)
        return functional.dropout(self.second(hidden), self.probability, self.training).square().sum()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_losses_gradients_and_later_draws_are_eagers(dtype, native):
    torch.manual_seed(0)
    eager = Dropped().to(dtype)
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"compute": {"native": native}})
    x, states = torch.randn(1100, 96).to(dtype), []
    for model in (eager, ours):
        torch.manual_seed(1)
        for _ in range(2):
            model.zero_grad()
            loss = model(x)
            loss.backward()
        states.append((loss.item(), torch.get_rng_state()))
    assert states[0][0] == pytest.approx(states[1][0], rel=1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(states[0][1], states[1][1])
    for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert (one.grad - other.grad).abs().max() <= tolerance * one.grad.abs().max()
    assert ort_accel.report(ours).counters[NAME] >= 4


def test_small_masks_stay_bytes():
    model = ort_accel.accelerate(Dropped())
    model(torch.randn(3, 96)).backward()
    assert NAME not in ort_accel.report(model).counters


def test_infinities_and_nan_pass_through():
    torch.manual_seed(0)
    eager = Dropped()
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    x = torch.randn(1100, 96)
    x[3, 5], x[4, 5] = torch.inf, torch.nan
    losses = []
    for model in (eager, ours):
        torch.manual_seed(1)
        losses.append(model(x).item())
    torch.testing.assert_close(losses[0], losses[1], equal_nan=True)
