"""Keys that attention masks are not computed, whatever form the mask has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ort_accel.row_skipping.row_demand import SkippableRows
from tests.row_skipping.modules import Attention, first_tokens, keys_of, low, padded
from tests.row_skipping.rewritten import Rewritten, assert_as_eager, padding_left_out, rewritten

LOW = torch.finfo(torch.float32).min


def added(mask: Tensor, hidden: float = LOW) -> Tensor:
    return (1.0 - mask[:, None, None, :]) * hidden


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": keys_of,
    "bool, for each query": lambda mask: keys_of(mask).expand(-1, -1, mask.shape[1], -1),
    "bool, for each head": lambda mask: keys_of(mask).expand(-1, 2, mask.shape[1], -1),
    "added": added,
    "added infinity": lambda mask: torch.zeros(mask.shape).masked_fill(mask == 0, -torch.inf)[:, None, None, :],
    "chosen": lambda mask: torch.where(keys_of(mask), 0.0, LOW),
    "filled": lambda mask: torch.zeros(1, 1, 1, mask.shape[1]).masked_fill(~keys_of(mask), LOW),
    "added to a bias": lambda mask: (
        added(mask) + torch.linspace(-1, 1, mask.shape[1] ** 2).view(1, 1, mask.shape[1], -1)
    ),
    "filled twice": lambda mask: added(mask).masked_fill(torch.arange(mask.shape[1]) == 1, LOW),
}


@pytest.mark.parametrize("name", MASKS)
def test_only_keys_that_the_mask_shows_are_computed(name: str) -> None:
    module = Attention(first_tokens, MASKS[name])
    ours = Rewritten(module)
    for kept in [(2, 5, 9), (9, 1, 4), (3, 3, 8, 6)]:
        ids, mask = padded(*kept)
        assert_as_eager(module, ours, ids, mask)
        assert (looked_at(MASKS[name](mask), mask.shape), mask.numel()) in ours.kept()
    assert ours.ran == {"some rows": 3}


class Biased(Attention):
    """With a learned bias in its mask, as in T5."""

    def __init__(self, bias: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(first_tokens, lambda mask: bias(self.distances(mask), mask))
        self.distance = torch.nn.Embedding(4, 2)

    def distances(self, mask: Tensor) -> Tensor:
        place = torch.arange(mask.shape[1])
        return self.distance((place[:, None] - place).abs().clamp(max=3)).permute(2, 0, 1)[None]


BIASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "chosen": lambda bias, mask: torch.where(keys_of(mask), bias, low()),
    "chosen, and a copy of it": lambda bias, mask: torch.where(keys_of(mask), bias, low()).contiguous(),
    "filled": lambda bias, mask: bias.masked_fill(~keys_of(mask), low()),
    "added": lambda bias, mask: bias + added(mask),
    "added to the mask": lambda bias, mask: added(mask) + bias,
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_that_is_learned_hides_nothing(name: str) -> None:
    padding_left_out(Biased(BIASES[name]))


def looked_at(shown: Tensor, shape: torch.Size) -> int:
    """Counts the keys of each sequence's first query; the first token is read in any case."""
    allowed = shown if shown.dtype == torch.bool else shown > LOW / 2
    return int(allowed.expand(shape[0], -1, -1, shape[1])[:, 0, 0].index_fill(1, torch.tensor([0]), True).sum())


def test_a_mask_that_only_lowers_scores_skips_nothing() -> None:
    ours = rewritten(Attention(first_tokens, lambda mask: added(mask, -1e4)), *padded(2, 5, 9))
    assert ours.kept() == [(3, 27), (27, 27)]


def test_a_query_without_keys_is_computed_as_in_eager_mode() -> None:
    module = Attention(first_tokens, keys_of)
    ours = rewritten(module, *padded(2, 5, 9))
    assert_as_eager(module, ours, *padded(2, 0, 9))
    assert ours.ran == {"some rows": 1, "all rows": 1}


def test_an_unread_sequence_without_real_tokens_is_skipped() -> None:
    module = Attention(lambda x: x[1], keys_of)
    ours = rewritten(module, *padded(3, 5, 9))
    assert ours.reasons, "a single row of many is not looked for"


@pytest.mark.parametrize("left", [False, True])
def test_causal_attention_reaches_back_only(left: bool) -> None:
    def causal(mask: Tensor) -> Tensor:
        return keys_of(mask) & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()

    module = Attention(lambda x: x[:, 6], causal)
    ours = rewritten(module, *padded(7, 8, 9, left=left))
    assert (5 + 6 + 7 if left else 7 + 7 + 7, 27) in ours.kept()


def test_causal_attention_without_a_mask() -> None:
    module = Attention(lambda x: x[:, 3], lambda mask: None, is_causal=True)
    ours = rewritten(module, *padded(9, 9))
    assert ours.kept() == [(2, 18), (8, 18)]


class Grouped(Attention):
    """Grouped heads without a mask: two query heads share one head of keys and values."""

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
        found = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


def test_grouped_heads_reach_back_only() -> None:
    ours = rewritten(Grouped(lambda x: x[:, 4], lambda mask: None), *padded(2, 5, 9))
    assert sorted(ours.kept()) == [(3, 27), (15, 27)]


def test_dropout_in_attention_draws_for_all_pairs() -> None:
    ours = rewritten(Attention(first_tokens, keys_of, dropout_p=0.3), *padded(2, 5, 9))
    assert ours.kept() == [(3, 27), (16, 27)]


def test_a_scale_is_kept() -> None:
    rewritten(Attention(first_tokens, keys_of, scale=0.2), *padded(2, 5, 9))


def test_without_padding_all_keys_are_computed() -> None:
    ours = rewritten(Attention(first_tokens, keys_of), *padded(2, 5, 9), wishes=SkippableRows(padding=False))
    assert ours.kept() == [(3, 27)]
