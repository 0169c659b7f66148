"""Gradients of gradients are those of eager mode, from the random numbers of the same call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ort_accel
from tests.against_eager import assert_step_as_eager, report
from tests.capture.language_model import Model, batch, engine
from tests.tiers import mostly_long

COUNTER = "backwards in eager mode, for create_graph"


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.drop, self.outer = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.drop(self.inner(x).tanh())
        return self.outer(hidden).square().mean(), hidden.sum(-1)


class Broken(Regression):
    """Python runs between its two graphs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.drop(self.inner(x).tanh())
        torch._dynamo.graph_break()
        return self.outer(hidden).square().mean(), hidden.sum(-1)


def given() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()


def penalty(model: nn.Module) -> list[Tensor | None]:
    """Of the gradient with regard to the inputs, as in WGAN-GP."""
    x = given()
    loss, _ = model(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return [loss, x.grad, *(parameter.grad for parameter in model.parameters())]


def hessian_times_vector(model: nn.Module) -> list[Tensor | None]:
    loss, more = model(given())
    weights = list(model.parameters())
    first = torch.autograd.grad(loss + more.square().sum(), weights, create_graph=True)
    return list(torch.autograd.grad(sum(item.sin().sum() for item in first), weights))


def through_leaves(model: nn.Module) -> list[Tensor | None]:
    """`backward(create_graph=True)` leaves gradients in parameters that have a gradient themselves."""
    loss, _ = model(given())
    loss.backward(create_graph=True)
    weights = list(model.parameters())
    first = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    sum(item.square().sum() for item in first if item is not None).backward()
    return [*first, *(weight.grad for weight in weights)]


def of_one_output(model: nn.Module) -> list[Tensor | None]:
    """The last layer has no gradient then."""
    _, more = model(given())
    weights = list(model.parameters())
    first = torch.autograd.grad(more.square().sum(), weights, create_graph=True, allow_unused=True)
    return [*first, *torch.autograd.grad(sum(item.square().sum() for item in first if item is not None), weights[:2])]


WAYS = [penalty, hessian_times_vector, through_leaves, of_one_output]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("model", mostly_long([Regression, Broken], Regression))
def test_gradients_of_gradients(model: type[nn.Module]) -> None:
    eager = model()
    ours = ort_accel.accelerate(copy.deepcopy(eager), engine())
    for way in WAYS:
        found = []
        for each in (ours, eager):
            each.zero_grad()
            torch.manual_seed(3)
            found.append([*way(each), torch.rand(2)])
        for mine, wanted in zip(*found, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, way=way: f"{way}: {text}")
    assert report(ours).counters[COUNTER] >= len(WAYS)


def test_of_a_graph_for_fewer_rows() -> None:
    eager = Model()
    ours = ort_accel.accelerate(copy.deepcopy(eager), engine())
    assert_step_as_eager(eager, ours, **batch(4, 10))
    assert not report(ours).counters[COUNTER], "an ordinary backward is a compiled one"
    found = []
    for model in (ours, eager):
        torch.manual_seed(3)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # fused ones have no second backward
            weights = [model.head.weight, model.wide.weight]
            first = torch.autograd.grad(model(**batch(4, 10)).loss, weights, create_graph=True)
            found.append([*first, *torch.autograd.grad(sum(item.square().sum() for item in first), weights)])
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)


def test_a_weight_that_is_changed_before_the_backward_is_an_error_as_in_eager_mode() -> None:
    for model in (Regression(), ort_accel.accelerate(Regression(), engine())):
        loss, _ = model(given())
        with torch.no_grad():
            model.outer.weight.mul_(2)
        with pytest.raises((RuntimeError, ort_accel.OrtAccelError), match=r"in place|inplace"):
            torch.autograd.grad(loss, model.inner.weight, create_graph=True)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Linear(4, 4), torch.ones(3, 4)),
        (lambda: nn.Embedding(5, 3), torch.tensor([1, 2])),
        (lambda: nn.Conv2d(3, 4, 3), torch.ones(1, 3, 8, 8)),
    ],
    ids=["linear", "embedding", "convolution"],
)
def test_on_the_meta_device_a_model_does_as_in_eager_mode(make: Callable[[], nn.Module], x: Tensor) -> None:
    with torch.device("meta"):
        eager = make()
    said = []
    for model in (eager, ort_accel.accelerate(copy.deepcopy(eager), engine())):
        try:
            result = model(x).sum()
            result.backward()
            said.append(str(result.device))
        except RuntimeError as error:
            said.append(str(error))
    assert said[0] == said[1]
