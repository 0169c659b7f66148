"""Odd, empty, scalar, broadcast, strided and changing shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.lowering.through_ort import Lowered, assert_like_eager

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x: (x * 2 + x.sin(), x / (x.abs() + 1), x.clamp(-1, 1)),
    "reductions": lambda x: (x.sum(-1), x.mean(0, keepdim=True), x.sum(), x.amax(1), x.argmax(-1), x.prod(-1)),
    "variances": lambda x: (x.var(-1), x.std(0, correction=0), *torch.var_mean(x, [0, 1], keepdim=True)),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(-1), x.logsumexp([0, 2])),
    "views": lambda x: (x.transpose(0, 2) + 1, x.flatten(1) * 2, x.unsqueeze(1).expand(-1, 3, -1, -1) + 0.5),
    "parts": lambda x: (x[1:, :, ::2] + 1, x[:, -3:] * 2, x.select(1, -1) + 1, *(p + 1 for p in x[:, :4].split(2, 1))),
    "joins": lambda x: (torch.cat([x, x + 1], 1), torch.stack([x, x * 2], -1), x.repeat(2, 1, 1, 3)),
    "padding": lambda x: (functional.pad(x, (1, 2)), functional.pad(x, (-1, 1, 2, 0), value=3.5)),
    "triangles": lambda x: (x.tril(), x.triu(1), x.diagonal(1, 1, 2), torch.diag_embed(x, 1)),
    "moves": lambda x: (x.flip(0), x.roll(2, 1), x.cumsum(1)),
    "creation": lambda x: (
        torch.zeros_like(x),
        x.new_full(x.shape, 2.5),
        torch.arange(x.shape[1]) * 2,
        torch.eye(x.shape[2]),
    ),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[2:]),
    "group norm": lambda x: functional.group_norm(x.transpose(0, 1).repeat_interleave(2, 1), 2),
    "batch norm": lambda x: torch.ops.aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5),
    "gated": lambda x: functional.glu(torch.cat([x, x + 1], 1), 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_odd_shape(name: str) -> None:
    torch.manual_seed(0)
    assert_like_eager(FUNCTIONS[name], torch.randn(9, 7, 41))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tensor_with_other_strides(name: str) -> None:
    torch.manual_seed(0)
    assert_like_eager(FUNCTIONS[name], torch.randn(5, 12, 14).transpose(0, 2)[::2, 1:])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes_that_change(name: str) -> None:
    torch.manual_seed(0)
    lowered = Lowered(FUNCTIONS[name], [torch.randn(5, 7, 8)], dynamic=True)
    for shape in [(5, 7, 8), (3, 11, 6), (8, 4, 40)]:
        x = torch.randn(shape)
        expected = FUNCTIONS[name](x)
        torch.testing.assert_close(lowered(x), [expected] if isinstance(expected, torch.Tensor) else list(expected))


@pytest.mark.parametrize("name", ["arithmetic", "views", "joins", "padding", "creation", "layer norm"])
def test_an_empty_tensor(name: str) -> None:
    assert_like_eager(FUNCTIONS[name], torch.randn(0, 7, 4), ort=False)


def test_sums_of_nothing() -> None:
    x = torch.randn(3, 0, 2)
    assert_like_eager(lambda x: (x.sum(1), x.mean(1), x.prod(1), x.any(1), x.all(1), x.sum()), x, ort=False)


def test_single_numbers() -> None:
    x = torch.tensor(2.5)
    assert_like_eager(lambda x: (x + 1, x.exp(), x.sum(), x.mean(), x.amax(), x.argmax(), x.cumsum(0)), x)


def test_broadcasting() -> None:
    a, b, c = torch.randn(9, 1, 41), torch.randn(7, 1), torch.tensor(3.0)
    assert_like_eager(
        lambda a, b, c: (a + b * c, torch.where(a > b, c, a), torch.maximum(a, b), torch.lerp(a, b, c)), a, b, c
    )
    assert_like_eager(lambda a, b, c: (torch.addcmul(a, b, c, value=0.5), torch.addcdiv(a, b, c)), a, b, c)


def test_types_are_promoted() -> None:
    whole, real, flags = torch.arange(1, 7), torch.randn(6), torch.tensor([True, False] * 3)
    assert_like_eager(
        lambda w, r, f: (w + r, w * 0.5, w / 2, f + w, f * r, w + f, torch.where(f, w, r)), whole, real, flags
    )
    assert_like_eager(lambda w, r, f: (w.sum(dtype=torch.float32), w > 2.5, w == r, r.double() + w), whole, real, flags)


def test_gradients_of_slices() -> None:
    grad = torch.randn(9, 4, 5)
    cases = {
        "step": (1, 0, 7, 2),
        "from the end": (1, -4, 9223372036854775807, 1),
        "middle": (1, 2, 6, 1),
    }
    for dim, start, end, step in cases.values():
        assert_like_eager(lambda g, a=(dim, start, end, step): torch.ops.aten.slice_backward(g, [9, 7, 5], *a), grad)
    assert_like_eager(lambda g: torch.ops.aten.select_backward(g, [9, 7, 4, 5], 1, -2), grad)
