"""Unfused attention: masked keys are not computed, and nothing else is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ort_accel.row_skipping.row_demand import SkippableRows
from ort_accel.row_skipping.row_sets import AllRows
from tests.row_skipping.modules import Attention, first_tokens, low, padded
from tests.row_skipping.rewritten import Rewritten, assert_as_eager, padding_left_out, rewritten
from tests.tiers import all_pairs

Weights = Callable[["WrittenOut", Tensor, Tensor], Tensor]
"""Functions from scores, and a mask that is true for real keys, to weights."""


class WrittenOut(Attention):
    """The attention layer without a fused operator."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(first_tokens, lambda mask: None)
        self.bias, self._weights = torch.nn.Parameter(torch.randn(2, 1, 1)), weights

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
        weights = self._weights(self, torch.matmul(q, k.transpose(2, 3)), mask[:, None, None, :].bool())
        return x + self.out(torch.matmul(weights, v).transpose(1, 2).contiguous().flatten(2))


def added(shown: Tensor) -> Tensor:
    return torch.zeros(shown.shape).masked_fill(~shown, low())


def in_place(module: WrittenOut, scores: Tensor, shown: Tensor) -> Tensor:
    scores /= 2.0
    scores += module.bias
    scores += added(shown)
    return scores.softmax(-1)


def beside_a_sink(m: WrittenOut, scores: Tensor, shown: Tensor) -> Tensor:
    sinks = m.bias[None].expand(len(scores), -1, scores.shape[2], -1)
    joined = torch.cat([scores + added(shown), sinks], -1)
    return (joined - joined.max(-1, keepdim=True).values).softmax(-1)[..., :-1]


def beside_a_plain_sink(m: WrittenOut, scores: Tensor, shown: Tensor) -> Tensor:
    sinks = m.bias[None].expand(len(scores), -1, scores.shape[2], -1)
    return torch.cat([scores + added(shown), sinks], -1).softmax(-1)[..., :-1]


def sink_first(m: WrittenOut, scores: Tensor, shown: Tensor) -> Tensor:
    sinks = m.bias[None].expand(len(scores), -1, scores.shape[2], -1)
    return torch.cat([sinks, scores + added(shown)], -1).softmax(-1)[..., :-1]


def sink_of_scores(m: WrittenOut, scores: Tensor, shown: Tensor) -> Tensor:
    return torch.cat([scores + added(shown), scores.mean(-1, keepdim=True)], -1).softmax(-1)[..., :-1]


def less_than_a_column(m: WrittenOut, scores: Tensor, shown: Tensor) -> Tensor:
    joined = torch.cat([scores + added(shown), m.bias[None].expand(len(scores), -1, scores.shape[2], -1)], -1)
    return (joined - joined.amax(-2, keepdim=True)).softmax(-1)[..., :-1]


def less_than_another(m: WrittenOut, scores: Tensor, shown: Tensor) -> Tensor:
    joined = torch.cat([scores + added(shown), m.bias[None].expand(len(scores), -1, scores.shape[2], -1)], -1)
    return (joined - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1]


SKIPPING: dict[str, Weights] = {
    "mask added": lambda m, scores, shown: (scores * 0.5 + added(shown)).softmax(-1),
    "mask added to": lambda m, scores, shown: (added(shown).expand(-1, -1, scores.shape[2], -1) + scores).softmax(-1),
    "filled": lambda m, scores, shown: scores.masked_fill(~shown, low()).softmax(-1),
    "chosen": lambda m, scores, shown: torch.where(shown, scores, low()).softmax(-1),
    "not chosen": lambda m, scores, shown: torch.where(~shown, low(), scores).softmax(-1),
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
    "a sink beside them": beside_a_sink,
    "a sink without the largest": beside_a_plain_sink,
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
    "a sink in front": sink_first,
    "a sink made of scores": sink_of_scores,
    "less the largest of each column": less_than_a_column,
    "less the largest of others": less_than_another,
    "no softmax": lambda m, scores, shown: scores.masked_fill(~shown, 0.0),
    "weights that are read besides": lambda m, scores, shown: (
        lambda weights: weights * weights.detach().mean()
    )((scores + added(shown)).softmax(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SKIPPING)
def test_masked_keys_are_not_computed(name: str) -> None:
    padding_left_out(WrittenOut(SKIPPING[name]))


@pytest.mark.parametrize("name", READING)
def test_keys_that_a_weight_may_reach_are_computed(name: str) -> None:
    ids, mask = padded(2, 5, 9)
    ours = rewritten(WrittenOut(READING[name]), ids, mask)
    assert not ours.graphs or (int(mask.sum()), mask.numel()) not in ours.kept()


Scores = Callable[["ScoresInParts", Tensor, Tensor], Tensor]
"""Functions from queries and keys of [batch, heads, length, width] to scores; the first two may be one dimension."""


class ScoresInParts(Attention):
    """A layer whose scores are more than a product of queries and keys."""

    def __init__(self, scores: Scores, *, merged: bool, besides: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        super().__init__(first_tokens, lambda mask: None)
        self.near, self._scores = torch.nn.Parameter(torch.randn(2, 4, 5)), scores
        self._merged, self._besides = merged, besides

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
        shown = mask[:, None, None, :].bool() & mask[:, None, :, None].bool()
        if self._merged:
            q, k, v = (part.reshape(-1, part.shape[2], part.shape[3]) for part in (q, k, v))
        scores = self._scores(self, q, k)
        weights = scores.view(len(x), 2, x.shape[1], x.shape[1]).masked_fill(~shown, low()).softmax(-1)
        found = torch.bmm(weights.view(scores.shape), v) if self._merged else torch.matmul(weights, v)
        found = found.view(len(x), 2, x.shape[1], -1)
        result = x + self.out(found.transpose(1, 2).contiguous().flatten(2))
        return result if self._besides is None else result + self._besides(scores, k)

    def by_distance(self, given: Tensor) -> Tensor:
        """A part of the scores of queries or keys: their products with the embedding of each distance."""
        table = self.near.repeat(len(given) // 2, 1, 1) if self._merged else self.near
        place = torch.arange(given.shape[-2])
        distance = (place[:, None] - place).clamp(-2, 2) + 2
        found = torch.matmul(given, table)
        return torch.gather(found, -1, distance.expand(*given.shape[:-1], -1))


def product(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-1, -2) / 1.5)


IN_PARTS: dict[str, Scores] = {
    "a product": lambda m, q, k: product(q, k),
    "of queries and distances": lambda m, q, k: product(q, k) + m.by_distance(q),
    "of keys and distances": lambda m, q, k: m.by_distance(k).transpose(-1, -2) / 3 + product(q, k),
    "of both": lambda m, q, k: product(q, k) + (m.by_distance(q) + m.by_distance(k).transpose(-1, -2)),
    "twice the same": lambda m, q, k: (lambda found: found + found.tanh())(product(q, k)),
    "keys of their own": lambda m, q, k: product(q, k) + product(q, k.tanh()),
}

NOT_APART: dict[str, Scores] = {
    "centred": lambda m, q, k: product(q, k - k.mean(-2, keepdim=True)),
    "ranked": lambda m, q, k: product(q, k) + product(q, k).cumsum(-1),
    "less the largest": lambda m, q, k: product(q, k) - product(q, k).amax(-1, keepdim=True),
    "by what keys give in turn": lambda m, q, k: product(q, product(k, k).matmul(k)),
    "shown to distances of others": lambda m, q, k: product(q, k) + m.by_distance(q).transpose(-1, -2).flip(-1),
    "of other sequences": lambda m, q, k: (
        product(q, k)
        + torch.gather(
            product(q, k),
            0,
            (torch.arange(len(q)) * 0).view(-1, *[1] * (q.ndim - 1)).expand(*q.shape[:-1], q.shape[-2]),
        )
    ),
    "divided by scores": lambda m, q, k: product(q, k) / (3 + product(q, k)).abs(),
    "divided by themselves": lambda m, q, k: (lambda found: found / found)(product(q, k)),
}


@pytest.mark.parametrize(("name", "merged"), all_pairs(IN_PARTS, (False, True)))
def test_scores_may_be_made_of_parts(name: str, merged: bool) -> None:
    padding_left_out(ScoresInParts(IN_PARTS[name], merged=merged, besides=None))


@pytest.mark.parametrize(("name", "merged"), all_pairs(NOT_APART, (False, True)))
def test_scores_that_are_made_from_other_keys_read_all_of_them(name: str, merged: bool) -> None:
    ids, mask = padded(2, 5, 9)
    assert reads_all(rewritten(ScoresInParts(NOT_APART[name], merged=merged, besides=None), ids, mask))


@pytest.mark.parametrize("merged", [False, True], ids=["four dimensions", "three"])
@pytest.mark.parametrize(
    "besides", [lambda scores, k: scores.mean(), lambda scores, k: k.mean()], ids=["its scores", "its keys"]
)
def test_values_read_beside_attention_are_computed(besides: Callable[[Tensor, Tensor], Tensor], merged: bool) -> None:
    ids, mask = padded(2, 5, 9)
    assert reads_all(rewritten(ScoresInParts(IN_PARTS["of both"], merged=merged, besides=besides), ids, mask))


def reads_all(ours: Rewritten) -> bool:
    """True if queries, keys and values are computed for all tokens."""
    linear = next(node for node in ours.proposal.traced.graph.nodes if node.target is torch.ops.aten.linear.default)
    return isinstance(ours.proposal.plan.demands.of[linear], AllRows)


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


def test_a_query_without_keys_is_computed_as_in_eager_mode() -> None:
    module = WrittenOut(SKIPPING["filled"])
    ours = rewritten(module, *padded(2, 5, 9))
    assert_as_eager(module, ours, *padded(2, 0, 9))
    assert ours.ran == {"some rows": 1, "all rows": 1}


def test_without_padding_all_keys_are_computed() -> None:
    ours = rewritten(WrittenOut(SKIPPING["filled"]), *padded(2, 5, 9), wishes=SkippableRows(padding=False))
    assert ours.kept() == [(3, 27)]
