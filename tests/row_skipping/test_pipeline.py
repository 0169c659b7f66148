"""From a forward graph to a proposal: unread outputs, and the row sets of each feature."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ort_accel.row_skipping.pipeline import row_sets_by_feature
from tests.row_skipping.modules import Attention, first_tokens, keys_of, padded
from tests.row_skipping.rewritten import Rewritten, rewritten


class Language(nn.Module):
    """Returns a loss, scores for each token, its flipped input, and a vector for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 9)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        hidden = self.body(x)
        scores = self.head(hidden)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores, x.flip(0), hidden[:, 0]


def language(*, loss_only: bool) -> tuple[Rewritten, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    labels = torch.randint(0, 9, (3, 7)).masked_fill(torch.rand(3, 7) < 0.6, -100)
    ours = Rewritten(Language(), loss_only=loss_only)
    return ours, ours(torch.randn(3, 7, 6), labels)


def test_outputs_per_token_are_not_computed_beside_a_loss() -> None:
    ours, outputs = language(loss_only=True)
    assert [output is None for output in outputs] == [False, True, True, False]
    assert ours.proposal.unread == {1, 2}


def test_all_outputs_are_computed_without_loss_only() -> None:
    ours, _ = language(loss_only=False)
    assert ours.reasons == ["every row is read, by the model's result"]


def test_without_gradients_all_outputs_are_computed() -> None:
    with torch.no_grad():
        ours, outputs = language(loss_only=True)
    assert ours.graphs == []
    assert all(output is not None for output in outputs)


def test_each_set_belongs_to_the_feature_that_makes_it_small() -> None:
    ours = rewritten(Attention(first_tokens, keys_of), *padded(2, 5, 9))
    kinds = {
        name: [ours.kept()[rows.number] for rows in sets]
        for name, sets in row_sets_by_feature(ours.proposal.plan).items()
    }
    assert kinds == {"density.labels": [], "density.padding": [(16, 27)], "compute.upstream": [(3, 27)]}


def test_attention_layers_share_one_row_set() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (Attention(first_tokens, keys_of) for _ in range(2))

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            x = self.first.attend(self.first.embed(ids), mask)
            return self.second.attend(x, mask)[:, 0]

    ours = rewritten(Layers(), *padded(2, 5, 9))
    assert len(ours.proposal.plan.attended_sets) == 1
    assert ours.kept() == [(3, 27), (16, 27)]
