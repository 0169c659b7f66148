"""Gradients that reach their parameters while the backward still runs, and updates made within it."""

import copy
import weakref

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel import OrtAccelError
from ort_accel.optim import FusedAdam, build_optimizer, step_in_backward

EARLY = {"memory": {"early_gradient_release": True}}
FEATURE = "memory.early_gradient_release"
WIDTH = 12


class Tower(nn.Module):
    """Layers that look alike, a weight used twice, and gradients that autograd hands on as views."""

    def __init__(self, depth=4):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + self.dropout(nn.functional.gelu(layer(hidden)))
        return self.norm(hidden) @ self.embed.weight.t()


@pytest.fixture
def tower():
    torch.manual_seed(0)
    return Tower()


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(20, (3, 5 + step % 2), generator=generator)


def loss_of(model, step=0):
    ids = batch(step)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def early(model, **compute):
    return ort_accel.accelerate(model, EARLY | ({"compute": compute} if compute else {}))


def train(model, in_backward, steps=6):
    optimizer = FusedAdam(model.parameters(), lr=3e-2, weight_decay=0.1)
    if in_backward:
        step_in_backward(optimizer)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step) / 2  # so that autograd runs something before the graph's backward
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_updates_within_the_backward_are_those_of_a_step_behind_it(tower):
    eager, late = copy.deepcopy(tower), ort_accel.accelerate(copy.deepcopy(tower), {"compute": {"placement": "fixed"}})
    expected, usual, losses = train(eager, False), train(late, False), train(early(tower), True)
    assert losses == usual == pytest.approx(expected, rel=1e-4)
    for ours, theirs in zip(tower.parameters(), late.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None


class ReadsLater(nn.Module):
    """The gradient of a weight is there before the backward has read the weight for the last time."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return (self.first(x) @ self.weight.detach()).tanh() @ self.weight


def test_a_weight_is_updated_only_once_the_backward_has_read_it():
    torch.manual_seed(0)
    usual, model = ort_accel.accelerate(ReadsLater()), ReadsLater()
    model.load_state_dict(usual.state_dict())
    x = torch.randn(7, WIDTH)
    for each, in_backward in ((usual, False), (early(model), True)):
        optimizer = FusedAdam(each.parameters(), lr=0.1)
        if in_backward:
            step_in_backward(optimizer)
        for _ in range(4):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), usual.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_come_and_go_while_the_backward_runs(tower):
    early(tower)
    seen, nodes, alive = [], [], []

    def use_up(parameter):
        nodes.append(torch._C._current_autograd_node().name())
        alive.append(sum(gradient() is not None for gradient in seen))
        seen.append(weakref.ref(parameter.grad))
        parameter.grad = None

    for parameter in tower.parameters():
        parameter.register_post_accumulate_grad_hook(use_up)
    loss_of(tower).backward()
    count = len(list(tower.parameters()))
    assert nodes == ["CompiledFunctionBackward"] * count
    assert alive == [0] * count
    report = ort_accel.report(tower)
    assert report.features[FEATURE].effect == f"{count} parameters get their gradients before the backward ends"
    assert sum(segment.graph == "backward 0" for segment in report.segments) > 4


def called(model):
    """What hooks on all parameters are told: how often they are called, with which gradients."""
    calls = {name: [] for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls[name].append(p.grad.clone()))
    return calls


def test_hooks_are_called_once_with_the_gradient_of_each_backward(tower):
    eager = copy.deepcopy(tower)
    expected, given = called(eager), called(early(tower))
    for step in range(3):
        for model in (eager, tower):
            torch.manual_seed(step)
            loss_of(model, step).backward()
    for name in expected:
        assert len(given[name]) == len(expected[name]) == 3  # of gradients that add up
        for ours, theirs in zip(given[name], expected[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "objective",
    [
        lambda model: loss_of(model, 0) + loss_of(model, 1),
        lambda model: loss_of(model) + sum(p.square().sum() for p in model.parameters()),
    ],
    ids=["two calls", "a penalty on the weights"],
)
def test_a_gradient_with_a_second_source_is_an_error_and_calls_nobody_twice(tower, objective):
    calls = called(early(tower))
    loss_of(tower).backward()
    with pytest.raises(OrtAccelError, match=r"given its gradient early, and then a second one.*set memory.early_grad"):
        objective(tower).backward()
    assert max(map(len, calls.values())) == 2


def test_where_nobody_waits_gradients_may_have_many_sources(tower):
    eager = copy.deepcopy(tower)
    for model in (eager, early(tower)):
        torch.manual_seed(0)
        (loss_of(model, 0) + loss_of(model, 1) + model.norm.weight.sum()).backward()
    for ours, theirs in zip(tower.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_who_only_asks_for_gradients_gets_them_and_nothing_is_accumulated(tower):
    early(tower).eval()
    calls = called(tower)
    for _ in range(2):
        loss_of(tower).backward()
    expected = [parameter.grad / 2 for parameter in tower.parameters()]
    for parameter in tower.parameters():
        parameter.grad = None
    count = len(calls["norm.weight"])
    for ours, theirs in zip(torch.autograd.grad(loss_of(tower), list(tower.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    loss_of(tower).backward(inputs=[tower.norm.bias])
    assert tower.norm.weight.grad is None
    torch.testing.assert_close(tower.norm.bias.grad, expected[-1])
    assert len(calls["norm.weight"]) == count


def test_a_hook_that_changes_gradients_does_so(tower):
    early(tower)
    calls = called(tower)
    tower.norm.bias.register_hook(lambda gradient: gradient * 0)
    for _ in range(3):
        loss_of(tower).backward()
    assert len(calls["norm.bias"]) == 3
    assert not tower.norm.bias.grad.any()


def test_an_optimizer_waits_for_step_again_once_that_is_taken_back(tower):
    optimizer = FusedAdam(early(tower).parameters(), lr=0.1)
    within = step_in_backward(optimizer)
    loss_of(tower).backward()
    loss_of(tower).backward()
    within.remove()
    before = tower.norm.bias.detach().clone()
    loss_of(tower).backward()
    assert torch.equal(tower.norm.bias, before)
    assert tower.norm.bias.grad is not None
    optimizer.step()
    assert not torch.equal(tower.norm.bias, before)


def test_restored_models_are_as_they_were(tower):
    calls = called(early(tower))
    for _ in range(2):
        loss_of(tower).backward()
    ort_accel.restore(tower)
    (loss_of(tower) + loss_of(tower)).backward()
    assert len(calls["norm.weight"]) == 3
    assert not tower.norm.weight._backward_hooks


def test_other_optimizers_are_refused(tower):
    with pytest.raises(OrtAccelError, match=r"only FusedAdam can update parameters within the backward.*AdamW"):
        step_in_backward(torch.optim.AdamW(tower.parameters()))
    config = ort_accel.load_config({"optimizer": {"name": "adamw_ort_fused", "fp16": {"enabled": True}}})
    with pytest.raises(OrtAccelError, match="without fp32 weights"):
        step_in_backward(build_optimizer(tower, config.optimizer, lr=0.1))
