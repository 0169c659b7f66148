"""A model that is changed after it was accelerated is run as it then is."""

import copy
import sys
import threading

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.reporting.fallbacks import Reason
from tests.against_eager import assert_same, assert_step_as_eager, compilations, pair, report, step


class Tower(nn.Module):
    """Some layers with dropout and a running statistic."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.norm, self.dropout, self.head = nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.dropout(self.norm(x)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_type(dtype):
    eager, ours = pair(Tower())
    x = torch.randn(5, 6)
    assert_step_as_eager(eager, ours, x)
    got, expected = (step(model.to(dtype), x.to(dtype)) for model in (ours, eager))
    tolerance = {} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    assert got.loss.dtype == expected.loss.dtype
    assert_same(got, expected, **tolerance)
    assert_step_as_eager(eager.float(), ours.float(), x)


@pytest.mark.long
def test_every_layer_frozen_in_turn():
    """More situations than Dynamo compiles by itself before it leaves a model to eager mode without a word."""
    eager, ours = pair(Tower(layers=12))
    x = torch.randn(5, 6)
    for frozen in range(12):
        for model in (eager, ours):
            for number, layer in enumerate(model.layers):
                layer.requires_grad_(number != frozen)
        before = compilations(ours)
        assert_step_as_eager(eager, ours, x)
        assert compilations(ours) == before + 2
    assert not report(ours).fallbacks or all(item.reason is not Reason.GRAPH_BREAK for item in report(ours).fallbacks)


def test_a_part_in_evaluation_mode():
    eager, ours = pair(Tower())
    for part in ("norm", "dropout", "norm"):
        for model in (eager, ours):
            getattr(model, part).train(not getattr(model, part).training)
        assert_step_as_eager(eager, ours, torch.randn(5, 6))
    torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))


def test_evaluation_compiles_nothing_after_its_second_length():
    eager, ours = pair(nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.GELU()))
    for length in (4, 6):
        assert_step_as_eager(eager, ours, torch.randint(0, 9, (2, length)))
    with torch.no_grad():
        ours.eval()(torch.randint(0, 9, (2, 4)))
        before = compilations(ours)
        for rows, length in ((2, 4), (2, 6), (3, 7), (4, 9), (5, 5)):
            ids = torch.randint(0, 9, (rows, length))
            torch.testing.assert_close(ours(ids), eager.eval()(ids))
    assert compilations(ours) == before


def test_a_new_head():
    eager, ours = pair(Tower())
    assert_step_as_eager(eager, ours, torch.randn(5, 6))
    eager.head = nn.Linear(6, 5)
    ours.head = copy.deepcopy(eager.head)
    assert_step_as_eager(eager, ours, torch.randn(5, 6))


def test_weights_that_are_loaded():
    eager, ours = pair(Tower())
    assert_step_as_eager(eager, ours, torch.randn(5, 6))
    other = Tower().state_dict()
    for model in (eager, ours):
        model.load_state_dict(other)
        model.load_state_dict({name: value.clone() for name, value in other.items()}, assign=True)
    assert_step_as_eager(eager, ours, torch.randn(5, 6))


@pytest.fixture
def busy_switching():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Wide(nn.Module):
    """Works on sizes that are known only when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        rows, length = x.shape[:2]
        flat = self.linear(x).reshape(rows * length, 6)
        return torch.cat([flat, flat.new_ones(rows + length, 6) * length]).reshape(-1, 2, 3).transpose(1, 2)


def test_threads_share_a_model_with_a_size_for_each(busy_switching):
    eager, ours = pair(Wide())
    xs = [torch.randn(rows, length, 6) for rows, length in ((2, 3), (4, 5), (7, 2), (3, 8))]
    with torch.no_grad():
        expected = [eager(x) for x in xs]
        for x in xs[:2]:
            ours(x)
    wrong: list[str] = []

    def work(number: int) -> None:
        with torch.no_grad():
            for _ in range(300):
                try:
                    torch.testing.assert_close(ours(xs[number]), expected[number])
                except Exception as error:
                    wrong.append(str(error))
                    return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_a_copy_learns_on_its_own():
    _, ours = pair(Tower())
    x = torch.randn(5, 6)
    other = copy.deepcopy(ours)
    first = step(ours, x)
    with torch.no_grad():
        other.head.weight.mul_(2)
    second = step(other, x)
    assert not torch.equal(first.gradients["layers.0.weight"], second.gradients["layers.0.weight"])
    assert_same(second, step(ort_accel.restore(other), x))
