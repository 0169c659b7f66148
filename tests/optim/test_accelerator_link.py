"""FP16_Optimizer in a loop of Accelerate: accumulation, clipping, skipped steps, saved and loaded states."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

from ort_accel.errors import OptimizerError
from ort_accel.optim import FP16_Optimizer, FusedAdam, LossScale, connect


@pytest.fixture(autouse=True)
def fresh_state():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).half()
    optimizer = FP16_Optimizer(FusedAdam(model.parameters(), lr=1e-2), loss_scale=LossScale(2.0**18, window=4))
    return model, optimizer


def loss_of(model, batch):
    return model(batch.half()).float().square().mean()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator) * (30 if number < 4 else 1) for number in range(16)]


def by_hand():
    model, optimizer = build()
    norms, skipped = [], []
    for number, batch in enumerate(batches()):
        optimizer.backward(loss_of(model, batch) / 2)
        if number % 2:
            norms.append(float(optimizer.clip_grad_norm_(0.5)))
            optimizer.step()
            skipped.append(optimizer.overflow)
            optimizer.zero_grad()
    return model, norms, skipped


def by_accelerate(folder=None):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = build()
    connect(accelerator, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, wrapped, schedule = accelerator.prepare(model, optimizer, schedule)
    norms, skipped = [], []
    for number, batch in enumerate(batches()):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            wrapped.step()
            schedule.step()
            if accelerator.sync_gradients:
                skipped.append(wrapped.step_was_skipped)
            wrapped.zero_grad()
        if folder is not None and number == 7:
            accelerator.save_state(folder)
            for parameter in model.parameters():
                parameter.data.zero_()
            optimizer.loss_scale.scale = 1.0
            accelerator.load_state(folder)
    return model, norms, skipped


def test_accelerates_loop_trains_as_one_of_ones_own():
    model, norms, skipped = by_hand()
    other, its_norms, its_skipped = by_accelerate()
    assert its_norms == norms
    assert its_skipped == skipped
    assert True in skipped
    assert False in skipped
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_state_that_accelerate_saves_is_complete(tmp_path):
    model, norms, _ = by_hand()
    other, its_norms, _ = by_accelerate(str(tmp_path / "state"))
    assert its_norms == norms
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_accelerator_that_scales_already_is_refused():
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(
        OptimizerError, match=r"has a GradScaler \(mixed_precision='no'\), and the loss would be scaled"
    ):
        connect(accelerator, build()[1])


def test_gradients_are_clipped_by_value_without_the_scale():
    accelerator = Accelerator(cpu=True)
    model, optimizer = build()
    connect(accelerator, optimizer)
    model, wrapped = accelerator.prepare(model, optimizer)
    accelerator.backward(loss_of(model, batches()[5]))
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    gradients = torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]])
    assert float(gradients.abs().max()) == pytest.approx(1e-3)
    before = [parameter.clone() for parameter in model.parameters()]
    wrapped.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
