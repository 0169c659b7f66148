"""Pooling over real tokens does not compute the masked ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ort_accel.kernels.token_log_probs import token_scores
from ort_accel.row_skipping.row_demand import SkippableRows
from tests.row_skipping.modules import Attention, keys_of, padded
from tests.row_skipping.rewritten import Rewritten, assert_as_eager, rewritten

Pool = Callable[[Tensor, Tensor], Tensor]


class Pooled(Attention):
    """Attention whose result is pooled with the mask."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(lambda x: x, keys_of)
        self._pool = pool

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self._pool(super().forward(ids, mask), mask)


def mean(x: Tensor, mask: Tensor) -> Tensor:
    """As sentence embeddings are made."""
    weight = mask.unsqueeze(-1).expand(x.size()).float()
    return (x * weight).sum(1) / weight.sum(1).clamp(min=1e-9)


POOLS: dict[str, Pool] = {
    "mean": mean,
    "sum, mask first": lambda x, mask: (mask.unsqueeze(-1) * x).sum(1),
    "largest": lambda x, mask: x.masked_fill(mask.unsqueeze(-1) == 0, -1e9).amax(1),
    "smallest": lambda x, mask: torch.where(mask.unsqueeze(-1) == 0, torch.full([], 1e9), x).amin(1),
    "largest, chosen": lambda x, mask: torch.where(mask.unsqueeze(-1).bool(), x, -1e9).amax(1),
}


@pytest.mark.parametrize("name", POOLS)
def test_only_tokens_that_are_pooled_are_computed(name: str) -> None:
    module = Pooled(POOLS[name])
    ours = Rewritten(module)
    for kept in [(2, 5, 9), (9, 1, 4), (3, 3, 8, 6)]:
        ids, mask = padded(*kept)
        assert_as_eager(module, ours, ids, mask)
        assert set(ours.kept()) == {(int(mask.sum()), mask.numel())}
    assert ours.ran == {"some rows": 3}


@pytest.mark.parametrize(
    "pool",
    [
        lambda x, mask: (x * mask.sum(1)[:, None, None]).sum(1),
        lambda x, mask: (x * x.sign()).sum(1),
        lambda x, mask: (x + mask.unsqueeze(-1)).sum(1),
        lambda x, mask: (x * mask.unsqueeze(-1)).sum(1) + x.mean(1),
    ],
    ids=["one factor for a row", "marked by itself", "added", "and a mean of all"],
)
def test_masked_tokens_with_other_readers_are_computed(pool: Pool) -> None:
    ids, mask = padded(2, 5, 9)
    ours = rewritten(Pooled(pool), ids, mask)
    assert not ours.graphs or (int(mask.sum()), mask.numel()) not in ours.kept()


def test_without_padding_all_tokens_are_computed() -> None:
    assert rewritten(Pooled(mean), *padded(2, 5, 9), wishes=SkippableRows(padding=False)).reasons


class Scored(Attention):
    """Scores of the tokens that are labelled, and zero for the others, make a loss."""

    def __init__(self) -> None:
        super().__init__(lambda x: x, keys_of)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        hidden, counts = super().forward(ids, mask)[:, :-1], labels[:, 1:] >= 0
        found, more = self.scores(hidden.flatten(0, 1), labels[:, 1:].clamp(min=0).flatten())
        return (
            found.view(counts.shape).masked_fill(~counts, 0).sum()
            + torch.where(counts, more.view(counts.shape), False).sum()
        )

    def scores(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logarithms = hidden.log_softmax(-1)
        return logarithms.gather(-1, targets[:, None]).squeeze(-1), logarithms.argmax(-1) == targets


class ScoredAtOnce(Scored):
    """The same by one operator."""

    def scores(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_scores(hidden, targets)[:2]


@pytest.mark.parametrize("kind", [Scored, ScoredAtOnce])
def test_scores_of_tokens_that_a_mask_takes_out_are_not_computed(kind: type[Scored]) -> None:
    module = kind()
    ours = Rewritten(module)
    for seed, kept in enumerate([(3, 5, 9), (9, 3, 4), (3, 3, 8, 6)]):
        ids, mask = padded(*kept)
        torch.manual_seed(seed)
        labels = torch.randint(0, 4, ids.shape).masked_fill(mask == 0, -1)
        labels[:, 1] = -1
        assert_as_eager(module, ours, ids, mask, labels)
        assert (int((labels[:, 1:] >= 0).sum()), mask[:, 1:].numel()) in ours.kept()
    assert ours.ran == {"some rows": 3}
