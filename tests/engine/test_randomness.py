"""Random numbers are eager's: the same seed draws the same masks, and leaves the generator in the same state."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ort_accel.reporting.fallbacks import Reason
from tests.against_eager import pair, report
from tests.tiers import all_pairs


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def assert_drawn_as_eager(function, x):
    """The same zeros to the bit, on the engine and in eager mode, and the same state of the generator behind it."""
    eager, ours = pair(Function(function))
    for seed in range(2):
        torch.manual_seed(seed)
        expected, state = eager(x), torch.get_rng_state()
        torch.manual_seed(seed)
        got = ours(x)
        assert torch.equal(got == 0, expected == 0)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(got, expected)
        if got.requires_grad:
            got.sum().backward()
            assert torch.equal(torch.get_rng_state(), state)
    return ours


LAYOUTS = {
    "plain": torch.randn(6, 10, 7, 5),
    "permuted": torch.randn(5, 6, 10, 7).permute(1, 2, 3, 0),
    "channels last": torch.randn(6, 10, 7, 5).contiguous(memory_format=torch.channels_last),
    "with gaps": torch.randn(6, 10, 7, 10)[..., ::2],
    "expanded": torch.randn(6, 1, 7, 5).expand(6, 10, 7, 5),
    "one row": torch.randn(1, 10, 1, 5).transpose(1, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_of_an_input(layout):
    assert_drawn_as_eager(lambda x: functional.dropout(x, 0.4), LAYOUTS[layout].exp())


@pytest.mark.parametrize(
    "permute",
    [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0), (1, 3, 0, 2)],
    ids=str,
)
def test_dropout_of_a_permuted_activation(permute):
    assert_drawn_as_eager(
        lambda x: functional.dropout(torch.exp(x.permute(permute)) + 1, 0.4) * 2, torch.randn(4, 3, 5, 6)
    )


def test_dropout_of_a_convolved_activation():
    kernel = torch.rand(4, 3, 3)

    def function(x):
        return functional.dropout(functional.conv1d(x, kernel).permute(0, 2, 1) + 1, 0.4)

    assert_drawn_as_eager(function, torch.rand(2, 3, 9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dropout_in_other_types(dtype):
    assert_drawn_as_eager(lambda x: functional.dropout(x, 0.4), torch.rand(9, 7, dtype=dtype) + 1)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_dropout_that_is_certain(probability):
    assert_drawn_as_eager(lambda x: functional.dropout(x, probability), torch.rand(9, 7) + 1)


@pytest.mark.parametrize("kind", [functional.dropout1d, functional.feature_alpha_dropout, functional.alpha_dropout])
def test_other_dropouts(kind):
    assert_drawn_as_eager(lambda x: kind(x, 0.4, True), torch.rand(4, 5, 6) + 1)


def test_dropout_in_attention():
    shape = (2, 3, 8, 4)
    assert_drawn_as_eager(
        lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True), torch.randn(shape)
    )


UNREAD = {
    "a dropout": lambda x: functional.dropout(x.exp() @ x.t(), 0.3),
    "one behind another": lambda x: functional.dropout(functional.dropout(x, 0.3).sin(), 0.3),
    "a dropout of a permuted value": lambda x: functional.dropout(x.t().cos(), 0.3),
    "a dropout that drops nothing": lambda x: functional.dropout(x.sin(), 0.0),
    "a dropout that drops all": lambda x: functional.dropout(x.sin(), 1.0),
    "noise": lambda x: torch.randn_like(x.exp()) + torch.rand(x.shape),
    "a choice": lambda x: torch.bernoulli(x.sigmoid()),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x.view(1, 1, *x.shape)] * 3, dropout_p=0.3),
}


@pytest.mark.parametrize(("name", "gradients"), all_pairs(UNREAD, (True, False)))
def test_what_is_drawn_for_nobody_is_drawn_all_the_same(name, gradients):
    def function(x):
        UNREAD[name](x)
        return functional.dropout(x + 1, 0.3)

    with torch.set_grad_enabled(gradients):
        for rows in (5, 6, 7):
            assert_drawn_as_eager(function, torch.rand(rows, 4).requires_grad_(gradients))


def test_what_is_drawn_for_nobody_costs_no_more_than_the_draw():
    def function(x):
        functional.dropout(x.exp() @ x.t(), 0.3)
        return functional.dropout(x + 1, 0.3)

    for sizes in ((5,), (5, 6)):
        torch.compiler.reset()
        _, ours = pair(Function(function))
        for rows in sizes:
            ours(torch.rand(rows, 4))
        ops: Counter[str] = Counter()
        for segment in report(ours).segments:
            ops.update(segment.ops)
        assert not {name for name in ops if "exp" in name or "mm" in name}, ops
        assert ops["ort_accel.kept.default"] == 2 * len(sizes)


def test_draws_of_several_kinds_keep_their_order():
    def function(x):
        noisy = x + torch.randn_like(x) * 0.1
        kept = functional.dropout(noisy, 0.3)
        chosen = torch.bernoulli(torch.full_like(x, 0.5))
        noise = torch.rand(x.shape) + torch.empty_like(x).exponential_()
        return functional.dropout(kept * chosen + noise, 0.2) + torch.normal(0.0, 1.0, x.shape)

    ours = assert_drawn_as_eager(function, torch.randn(6, 8))
    assert {item.reason for item in report(ours).fallbacks if "rand" in item.op} == {Reason.RANDOM}


@pytest.mark.parametrize(
    ("library", "draw"),
    [
        (np.random, lambda x: torch.from_numpy(np.random.rand(*x.shape) < 0.5)),
        (np.random, lambda x: x > float(np.random.normal())),
        (np.random, lambda x: torch.ones_like(x) if np.random.random() < 0.5 else x.sign()),
        (random, lambda x: x > random.random()),
        (random, lambda x: torch.ones_like(x) if random.random() < 0.5 else x.sign()),
    ],
    ids=[
        "an array of numpy's",
        "a number of numpy's",
        "a choice by numpy",
        "a number of Python's",
        "a choice by Python",
    ],
)
def test_what_numpy_and_python_draw_is_theirs(library, draw):
    eager, ours = pair(Function(lambda x: functional.dropout(x * draw(x), 0.4)))
    for seed in range(4):
        results = []
        for model in (eager, ours):
            torch.manual_seed(seed)
            library.seed(seed)
            results.append((model(torch.linspace(-1, 1, 30).view(6, 5)), library.random()))
        (expected, after), (got, ours_after) = results
        torch.testing.assert_close(got, expected)
        assert ours_after == after


@pytest.mark.parametrize("kind", ["batch norm", "maximum pool"])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_dropout_behind_a_transposed_input_draws_in_the_order_of_eagers_memory(kind, has_gradient):
    norm = nn.BatchNorm1d(6) if kind == "batch norm" else nn.MaxPool1d(2)
    x = torch.randn(5, 8, 6, requires_grad=has_gradient)
    assert_drawn_as_eager(lambda x: functional.dropout(norm(x.transpose(1, 2)).transpose(1, 2), 0.4), x)
