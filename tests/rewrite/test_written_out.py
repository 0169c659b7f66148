"""Attention that a model writes out: what only hidden keys lead to is not computed, and nothing else is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ort_accel.rewrite.demand import Wishes
from tests.rewrite.modules import Attention, first_tokens, padded
from tests.rewrite.rewritten import Rewritten, assert_as_eager, rewritten

Weights = Callable[["WrittenOut", Tensor, Tensor], Tensor]
"""The weights of values, from scores and a mask that is true for real keys."""


class WrittenOut(Attention):
    """The same layer with its attention as the model's own lines."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(first_tokens, lambda mask: None)
        self.bias, self._weights = torch.nn.Parameter(torch.randn(2, 1, 1)), weights

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
        weights = self._weights(self, torch.matmul(q, k.transpose(2, 3)), mask[:, None, None, :].bool())
        return x + self.out(torch.matmul(weights, v).transpose(1, 2).contiguous().flatten(2))


def low() -> float:
    return torch.finfo(torch.float32).min


def added(shown: Tensor) -> Tensor:
    return torch.zeros(shown.shape).masked_fill(~shown, low())


def in_place(module: WrittenOut, scores: Tensor, shown: Tensor) -> Tensor:
    scores /= 2.0
    scores += module.bias
    scores += added(shown)
    return scores.softmax(-1)


SKIPPING: dict[str, Weights] = {
    "mask added": lambda m, scores, shown: (scores * 0.5 + added(shown)).softmax(-1),
    "mask added to": lambda m, scores, shown: (added(shown).expand(-1, -1, scores.shape[2], -1) + scores).softmax(-1),
    "filled": lambda m, scores, shown: scores.masked_fill(~shown, low()).softmax(-1),
    "chosen": lambda m, scores, shown: torch.where(shown, scores, low()).softmax(-1),
    "chosen, or a tensor": lambda m, scores, shown: torch.where(shown, scores, torch.full([], low())).softmax(-1),
    "capped before": lambda m, scores, shown: ((scores / 3).tanh() * 3 + added(shown)).softmax(-1),
    "a learned bias": lambda m, scores, shown: (scores + m.bias + added(shown)).softmax(-1),
    "a learned bias with the mask": lambda m, scores, shown: (scores + (m.bias + added(shown))).softmax(-1),
    "in place": in_place,
    "softmax in another type": lambda m, scores, shown: (
        (scores + added(shown)).softmax(-1, dtype=torch.float64).to(torch.float32)
    ),
    "dropout": lambda m, scores, shown: F.dropout((scores + added(shown)).softmax(-1), 0.3),
    "heads weighed": lambda m, scores, shown: (scores + added(shown)).softmax(-1) * m.bias,
    "hidden twice": lambda m, scores, shown: (scores.masked_fill(~shown, low()) + added(shown)).softmax(-1),
}

READING: dict[str, Weights] = {
    "no mask": lambda m, scores, shown: scores.softmax(-1),
    "a mask that only makes small": lambda m, scores, shown: (scores + added(shown).clamp(min=-1e4)).softmax(-1),
    "taken away": lambda m, scores, shown: torch.add(scores, added(shown), alpha=-1e-38).softmax(-1),
    "shown again": lambda m, scores, shown: (scores + added(shown)).masked_fill(~shown, 0.5).softmax(-1),
    "capped behind": lambda m, scores, shown: ((scores + added(shown)) / 3).tanh().softmax(-1),
    "softmax over queries": lambda m, scores, shown: (scores + added(shown)).softmax(-2),
    "something added to weights": lambda m, scores, shown: (scores + added(shown)).softmax(-1) + 0.1,
    "no softmax": lambda m, scores, shown: scores.masked_fill(~shown, 0.0),
    "weights that are read besides": lambda m, scores, shown: (
        lambda weights: weights * weights.detach().mean()
    )((scores + added(shown)).softmax(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SKIPPING)
def test_what_leads_to_hidden_keys_is_not_computed(name: str) -> None:
    module = WrittenOut(SKIPPING[name])
    ours = Rewritten(module)
    for kept in [(2, 5, 9), (9, 1, 4), (3, 3, 8, 6)]:
        ids, mask = padded(*kept)
        assert_as_eager(module, ours, ids, mask)
        assert (int(mask.sum()), mask.numel()) in ours.kept()
    assert ours.ran == {"some rows": 3}


@pytest.mark.parametrize("name", READING)
def test_keys_that_a_weight_may_reach_are_computed(name: str) -> None:
    ids, mask = padded(2, 5, 9)
    ours = rewritten(WrittenOut(READING[name]), ids, mask)
    assert not ours.graphs or (int(mask.sum()), mask.numel()) not in ours.kept()


class TwoLayers(WrittenOut):
    """The second layer sees the first tokens only, and so what they saw in the first."""

    def __init__(self, near_first: bool) -> None:
        super().__init__(lambda m, scores, shown: (scores + added(shown)).softmax(-1))
        self._near_first = near_first

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        near = mask * (torch.arange(mask.shape[1]) < 3)
        masks = (near, mask) if self._near_first else (mask, near)
        return first_tokens(self.attend(self.attend(self.embed(ids), masks[0]), masks[1]))


@pytest.mark.parametrize("near_first", [False, True])
def test_layers_with_masks_of_their_own(near_first: bool) -> None:
    module = TwoLayers(near_first)
    ours = Rewritten(module)
    for kept in [(2, 5, 9), (9, 1, 4)]:
        ids, mask = padded(*kept)
        assert_as_eager(module, ours, ids, mask)
        assert (int(mask.sum()), mask.numel()) in ours.kept()


def test_a_query_that_sees_nothing_is_computed_as_in_eager_mode() -> None:
    module = WrittenOut(SKIPPING["filled"])
    ours = rewritten(module, *padded(2, 5, 9))
    assert_as_eager(module, ours, *padded(2, 0, 9))
    assert ours.ran == {"some rows": 1, "all rows": 1}


def test_without_the_wish_all_keys_are_computed() -> None:
    ours = rewritten(WrittenOut(SKIPPING["filled"]), *padded(2, 5, 9), wishes=Wishes(padding=False))
    assert ours.kept() == [(3, 27)]
