"""Subscribers see the same in the same order on ONNX Runtime as in eager PyTorch, and break no graph."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ort_accel
from ort_accel import OrtAccelError
from ort_accel.subscribers import SubscriberBase, SubscriberManager


class Notes(SubscriberBase):
    """Keeps all it is told."""

    def __init__(self):
        self.seen = []

    def on_input(self, site, tensor):
        self.seen.append(("in", site, tensor.clone()))

    def on_output(self, site, tensor):
        self.seen.append(("out", site, tensor.clone()))

    def on_output_gradient(self, site, gradient):
        self.seen.append(("out'", site, gradient.clone()))

    def on_input_gradient(self, site, gradient):
        self.seen.append(("in'", site, gradient.clone()))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values, *, scale):
        return {"a": self.linear(values) * scale, "b": (self.linear(values + 1), 7)}


class Outer(nn.Module):
    """Nested modules, arguments by name, a module called twice, outputs in a tree."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.last = nn.Linear(4, 1)

    def forward(self, values):
        given = self.inner(values, scale=torch.tensor(2.0))
        return self.last(given["a"].relu() + given["b"][0] * given["b"][1]).mean()


def trained(model, notes, steps=2):
    torch.manual_seed(0)
    with SubscriberManager().subscribe(model, [notes]):
        for _ in range(steps):
            model(torch.randn(3, 4)).backward()
    return notes.seen


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Outer()


def test_the_engine_shows_what_eager_shows_without_a_graph_break(model):
    other = ort_accel.accelerate(copy.deepcopy(model))
    wanted, found = trained(model, Notes()), trained(other, Notes())
    forward = [[note for note in notes if "'" not in note[0]] for notes in (wanted, found)]
    assert [note[:2] for note in forward[0]] == [note[:2] for note in forward[1]]

    def by_site(notes):
        return {note[:2]: note[2] for note in notes}

    assert by_site(wanted).keys() == by_site(found).keys()
    for place, tensor in by_site(wanted).items():
        torch.testing.assert_close(by_site(found)[place], tensor, msg=str(place))
    assert {side for side, _, _ in found} == {"in", "out", "in'", "out'"}
    report = ort_accel.report(other)
    assert not [item for item in report.fallbacks if not item.reason.is_choice]
    assert report.counters["compilations"] == 2


def test_steps_and_calls_are_counted(model):
    seen = trained(model, Notes(), steps=3)
    places = [(site.step, site.call) for side, site, _ in seen if site.module == "inner.linear" and side == "out'"]
    assert sorted(places) == [(step, call) for step in range(3) for call in range(2)]


def test_subscribers_get_the_right_values(model):
    seen = {(side, site.module, site.tensor, site.call): tensor for side, site, tensor in trained(model, Notes(), 1)}
    linear = model.inner.linear
    given = seen["in", "inner.linear", 0, 0]
    torch.testing.assert_close(seen["out", "inner.linear", 0, 0], linear(given))
    assert seen["in", "inner", 1, 0] == 2.0
    back = [seen["out'", "inner.linear", 0, call].T @ seen["in", "inner.linear", 0, call] for call in range(2)]
    torch.testing.assert_close(sum(back), linear.weight.grad)


@pytest.mark.parametrize("accelerated", [False, True])
def test_subscribing_and_leaving_reach_a_model_that_has_run(model, accelerated):
    if accelerated:
        ort_accel.accelerate(model)
    values, notes = torch.randn(3, 4), Notes()
    plain = model(values)
    manager = SubscriberManager().subscribe(model, [notes])
    assert torch.equal(model(values), plain)
    count = len(notes.seen)
    assert count
    manager.unsubscribe()
    assert torch.equal(model(values), plain)
    assert len(notes.seen) == count
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Doubling(SubscriberBase):
    def before_forward(self, module, args, kwargs):
        return (tuple(2 * value for value in args), kwargs) if isinstance(module, Outer) else (args, kwargs)

    def after_forward(self, module, args, kwargs, output):
        return output + 1 if isinstance(module, Outer) else output


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_subscriber_may_change_what_goes_in_and_comes_out(model, accelerated):
    values = torch.randn(3, 4)
    wanted = model(2 * values) + 1
    if accelerated:
        ort_accel.accelerate(model)
    with SubscriberManager().subscribe(model, [Doubling()]):
        torch.testing.assert_close(model(values), wanted)


def test_recomputations_are_not_shown():
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, values):
            return checkpoint(self.linear, values, use_reentrant=False).sum()

    notes = Notes()
    with SubscriberManager().subscribe(Saving(), [notes]) as manager:
        manager._model(torch.randn(2, 4)).backward()
    assert [site.call for side, site, _ in notes.seen if side == "out" and site.module == "linear"] == [0]


def test_a_manager_has_one_model(model):
    with (
        SubscriberManager().subscribe(model, []) as manager,
        pytest.raises(OrtAccelError, match="has a model already"),
    ):
        manager.subscribe(model, [])
