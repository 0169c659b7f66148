"""Tokens that a selection or a slice drops are not computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ort_accel.row_skipping.row_demand import SkippableRows
from tests.row_skipping.modules import Attention, first_tokens, keys_of, padded
from tests.row_skipping.rewritten import Rewritten, assert_as_eager, rewritten

WIDTH = 6


class Body(nn.Module):
    """Works on every token alone, and reads some tokens."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self._read = read

    def forward(self, x: Tensor) -> Tensor:
        return self._read(self.drop(self.second(self.norm(self.first(x)).relu())))


@pytest.mark.parametrize(
    ("read", "of_seven"),
    [
        (lambda x: x[:, 0], 1),
        (lambda x: x[:, -1], 1),
        (lambda x: x[:, 2] + x[:, 0], 2),
        (lambda x: x[:, 1:][:, 0].sin(), 1),
        (lambda x: x[:, :-2][:, -1], 1),
        (lambda x: x[:, 3].unsqueeze(1).expand(-1, 4, -1), 1),
    ],
    ids=["first", "last", "two", "of a slice", "of a slice from the end", "expanded again"],
)
def test_only_the_tokens_that_are_read_are_computed(read: Callable[[Tensor], Tensor], of_seven: int) -> None:
    module = Body(read)
    ours = Rewritten(module)
    for rows, length in [(3, 7), (5, 9), (2, 5)]:
        assert_as_eager(module, ours, torch.randn(rows, length, WIDTH))
        assert (of_seven * rows, rows * length) in ours.kept()
    assert ours.ran == {"some rows": 3}


class LastTokens(nn.Module):
    """Reads one token of each sequence by index, as classifiers on causal models do."""

    def __init__(self, sequences: Callable[[int], Tensor] = torch.arange) -> None:
        super().__init__()
        self.body, self._sequences = Body(lambda x: x), sequences

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.body(x)[self._sequences(x.shape[0]), places]


def test_indexed_tokens_are_computed_alone() -> None:
    module = LastTokens()
    ours = Rewritten(module)
    for places, length in [([6, 2, 4], 7), ([0, -1, 3, -9, 8], 9)]:
        assert_as_eager(module, ours, torch.randn(len(places), length, WIDTH), torch.tensor(places))
        assert ours.kept() == [(len(places), len(places) * length)]
    assert ours.ran == {"some rows": 2}


@pytest.mark.parametrize("outside", [7, -8])
def test_an_index_out_of_bounds_raises_as_in_eager_mode(outside: int) -> None:
    module = LastTokens()
    ours = rewritten(module, torch.randn(3, 7, WIDTH), torch.tensor([6, 2, 4]))
    for model in (module, ours):
        with pytest.raises(IndexError, match="out of bounds"):
            model(torch.randn(3, 7, WIDTH), torch.tensor([6, outside, 4]))


@pytest.mark.parametrize(
    "sequences",
    [lambda rows: torch.arange(rows).flip(0), lambda rows: torch.arange(0, 2 * rows, 2) // 2, torch.zeros],
    ids=["backward", "by another way", "the first alone"],
)
def test_tokens_indexed_in_another_order_need_all_tokens(sequences: Callable[[int], Tensor]) -> None:
    def whole_numbers(rows: int) -> Tensor:
        return sequences(rows).long()

    assert rewritten(LastTokens(whole_numbers), torch.randn(3, 7, WIDTH), torch.tensor([6, 2, 4])).reasons


def test_tokens_that_the_model_selects_need_all_tokens() -> None:
    module = Body(lambda x: x[torch.arange(x.shape[0]), x.sum(-1).argmax(-1)])
    assert rewritten(module, torch.randn(3, 7, WIDTH)).reasons


def test_a_single_token_is_computed_with_two_others() -> None:
    """A graph for a single row would be another graph."""
    module = Body(lambda x: x[:, 0])
    ours = rewritten(module, torch.randn(3, 7, WIDTH))
    assert_as_eager(module, ours, torch.randn(1, 7, WIDTH))
    assert ours.kept() == [(3, 7)]


@pytest.mark.parametrize(
    "read",
    [lambda x: x[0], lambda x: x[:, ::2].mean(1), lambda x: x.mean(1), lambda x: x[:, 1:]],
    ids=["a row", "every other", "the mean", "a slice"],
)
def test_other_selections_compute_all_tokens(read: Callable[[Tensor], Tensor]) -> None:
    assert rewritten(Body(read), torch.randn(3, 7, WIDTH)).reasons


def test_without_upstream_every_token_is_computed() -> None:
    ours = rewritten(Body(lambda x: x[:, 0]), torch.randn(3, 7, WIDTH), wishes=SkippableRows(upstream=False))
    assert len(ours.reasons) == 1
    assert ours.graphs == []


def test_queries_of_attention_are_those_that_are_read() -> None:
    ours = rewritten(Attention(first_tokens, keys_of), *padded(2, 5, 9), wishes=SkippableRows(padding=False))
    assert ours.kept() == [(3, 27)]
    last = [n for n in ours.graph.nodes if "linear" in str(n.target)][-1]
    assert last.meta["val"].shape[0] == 3
