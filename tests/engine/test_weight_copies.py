"""Autocast's copies of weights are made once for the micro-batches of a step, and never outlive a change."""

import copy
import gc

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.reporting.report import State
from tests.tiers import mostly_long

KEY = "precision.cache_cast_weights"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x).float().square().mean()


def pair(wish="auto", model=None):
    torch.manual_seed(0)
    eager = model or Net()
    ours = ort_accel.accelerate(
        copy.deepcopy(eager), {"precision": {"cache_cast_weights": wish}, "observe": {"log_level": "error"}}
    )
    return eager, ours


def batch(seed):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def backward(model, seed, dtype=torch.bfloat16):
    with torch.autocast("cpu", dtype):
        loss = model(batch(seed))
    loss.backward()
    return loss.detach()


def both(models, seed):
    """A micro-batch in both models; losses and the gradients so far are equal."""
    losses = [backward(model, seed) for model in models]
    torch.testing.assert_close(losses[1], losses[0])
    for ours, eager in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, eager.grad, rtol=1e-2, atol=1e-3)


def counted(model):
    return ort_accel.report(model).counters["weight copies used again"]


def copies_of(model):
    return model._compiled_call_impl.backend.lowering.copies._copies


def test_micro_batches_share_copies_and_the_step_after_has_its_own():
    models = pair(True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for step in range(3):
        for micro in range(3):
            both(models, 10 * step + micro)
            assert counted(models[1]) == 4 * (2 * step + micro)  # two weights and two biases
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = ort_accel.report(models[1]).features[KEY]
    assert found.state is State.APPLIED
    assert found.effect.startswith("copies of 4 weights (")


def test_by_default_they_are_kept_once_gradients_are_accumulated():
    models = pair()
    both(models, 0)
    assert not copies_of(models[1])
    assert ort_accel.report(models[1]).features[KEY].state is State.OFF
    both(models, 1)
    assert len(copies_of(models[1])) == 4
    both(models, 2)
    assert counted(models[1]) == 4


def test_switched_off_every_batch_casts():
    models = pair(False)
    for seed in range(3):
        both(models, seed)
    assert counted(models[1]) == 0
    assert ort_accel.report(models[1]).features[KEY].reason == "switched off"


@torch.no_grad()
def in_place(model):
    for parameter in model.parameters():
        parameter.mul_(1.5)


def swapped(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def swapped_twice(model):
    """With memory freed in between, so that the second may lie where the first one was."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
        gc.collect()
        parameter.data = torch.full_like(parameter, 0.25)


def loaded(model):
    torch.manual_seed(7)
    model.load_state_dict(Net().state_dict())


def replaced(model):
    for layer in (model.layers[0], model.layers[2]):
        old = layer.weight
        layer.weight = nn.Parameter(torch.full_like(old, 0.125))
        layer.weight.grad = old.grad


def stepped(model):
    """By an optimizer that writes behind autograd's back, and leaves the gradients."""

    class Behind(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad.data)

    Behind(model.parameters(), lr=1.0).step()


def written_after_zero_grad(model):
    model.zero_grad()
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


@pytest.mark.parametrize(
    "change",
    mostly_long(
        [in_place, swapped, swapped_twice, loaded, replaced, stepped, written_after_zero_grad],
        in_place,
        swapped,
        stepped,
    ),
)
def test_a_changed_weight_is_never_taken_for_the_old_one(change):
    models = pair(True)
    both(models, 0)
    both(models, 1)
    before = [parameter.detach().clone() for parameter in models[0].parameters()]
    for model in models:
        change(model)
    assert any(not torch.equal(a, b) for a, b in zip(before, models[0].parameters(), strict=True))
    both(models, 2)
    both(models, 3)


def test_weights_that_are_not_trained_share_copies_as_well():
    model = Net()
    model.layers[0].requires_grad_(requires_grad=False)
    models = pair(True, model)
    for seed in range(2):
        losses = [backward(each, seed) for each in models]
        torch.testing.assert_close(losses[1], losses[0])
    assert counted(models[1]) == 4


def test_copies_are_dropped_before_the_optimizers_step():
    _, ours = pair(True)
    backward(ours, 0)
    assert copies_of(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(len(copies_of(ours))))
    optimizer.step()
    assert seen == [0]


def test_a_restored_model_leaves_no_hook_behind():
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    torch._dynamo.reset()
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    _, ours = pair(True)
    backward(ours, 0)
    assert len(_global_optimizer_pre_hooks) > before
    ort_accel.restore(ours)
    del ours
    torch._dynamo.reset()
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before


def test_evaluation_in_between_changes_nothing():
    models = pair(True)
    both(models, 0)
    for model in models:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(batch(5))
    both(models, 1)
    assert counted(models[1]) == 4


def test_a_loop_that_updates_weights_through_data_trains():
    models = pair()
    for seed in range(4):
        both(models, seed)
        for model in models:
            for parameter in model.parameters():
                parameter.data -= 0.3 * parameter.grad
                parameter.grad.zero_()


class WideParts(nn.Module):
    """Keeps a router and the head in single precision under autocast."""

    def __init__(self):
        super().__init__()
        self.body, self.router, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1100)

    def forward(self, x):
        hidden = self.body(x).float()
        with torch.autocast("cpu", enabled=False):
            hidden = hidden * self.router(hidden).softmax(-1)
            scores = self.head(hidden)
        return nn.functional.cross_entropy(scores, torch.arange(len(x)))


@pytest.mark.parametrize("fusions", ["auto", False])
def test_what_a_model_keeps_in_single_precision_has_gradients_in_single_precision(fusions):
    torch.manual_seed(0)
    eager = WideParts()
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"compute": {"fusions": fusions}})
    losses = [backward(model, 1) for model in (eager, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for name in ("router", "head"):
        wanted, found = (getattr(model, name).weight.grad for model in (eager, ours))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
