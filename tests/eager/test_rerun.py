"""A captured graph that runs once more gives what it would have given when it was called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ort_accel.eager.rerun import EagerRerun
from ort_accel.errors import OrtAccelError


class Told:
    """Counts how often it is told."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


X, WEIGHT = torch.randn(3, 4), nn.Parameter(torch.randn(4, 4))


def dropped(x: Tensor, weight: Tensor) -> list[Tensor]:
    product = F.linear(x, weight)
    return [F.dropout(product, 0.5), product]


def called(told: Told, x: Tensor = X) -> EagerRerun:
    module = make_fx(dropped, pre_dispatch=True)(X, WEIGHT)
    torch.manual_seed(4)
    return EagerRerun(module, [x, WEIGHT], told)


def test_random_numbers_are_those_of_the_call_and_the_present_ones_stay() -> None:
    again = called(Told())
    torch.rand(5)
    before = torch.get_rng_state()
    first = again.output(0)()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(first, dropped(X, WEIGHT)[0])


def test_it_runs_once_for_all_outputs_and_tells_of_it() -> None:
    told = Told()
    again = called(told)
    assert told.times == 0
    first, product = again.output(0)(), again.output(1)()
    assert told.times == 1
    assert first.grad_fn is not None
    assert torch.equal(first[first != 0], 2 * product[first != 0])


def test_gradients_and_autocast_are_those_of_the_call() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        again = called(Told())
    product = again.output(1)()
    assert (product.dtype, product.requires_grad) == (torch.bfloat16, False)
    assert not torch.is_autocast_enabled("cpu")


def test_inputs_may_come_from_inference_mode() -> None:
    with torch.inference_mode():
        x = X * 1
    with torch.no_grad():
        again = called(Told(), x)
    assert torch.equal(again.output(1)(), dropped(X, WEIGHT)[1])


def test_weights_that_were_kept_before_they_changed_are_those_of_the_call() -> None:
    again = called(Told())
    wanted = F.linear(X, WEIGHT).detach()
    assert again.given is not None
    again.given.keep({})
    with torch.no_grad():
        WEIGHT.mul_(2)
    product = again.output(1)()
    assert torch.equal(product, wanted)
    assert product.requires_grad
    with pytest.raises(RuntimeError, match="weights or inputs have changed"):
        product.sum().backward()


def test_weights_that_were_kept_and_did_not_change_get_gradients() -> None:
    again = called(Told())
    assert again.given is not None
    again.given.keep({})
    product = again.output(1)()
    assert torch.autograd.grad(product.sum(), WEIGHT)[0].shape == WEIGHT.shape


def test_weights_that_have_changed_are_an_error() -> None:
    again = called(Told())
    with torch.no_grad():
        WEIGHT.mul_(2)
    with pytest.raises(OrtAccelError, match=r"set compute\.loss_only to false"):
        again.output(0)()
