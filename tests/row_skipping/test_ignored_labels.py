"""Only rows with a label go through head and loss, whatever form the loss has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ort_accel.row_skipping.row_demand import SkippableRows
from tests.row_skipping.rewritten import Rewritten, assert_as_eager, rewritten

CLASSES = 9

Loss = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A body and a head over classes, with some loss on [rows, length, classes] and [rows, length]."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.norm = nn.Embedding(20, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(6, CLASSES)
        self._loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.drop(self.norm(F.gelu(self.body(self.embed(ids)))))
        return self._loss(self.head(hidden), labels)


def batch(rows: int, length: int, share: float, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Returns ids, and labels of which this share is valid."""
    torch.manual_seed(rows * length)
    labels = torch.randint(0, CLASSES, (rows, length))
    return torch.randint(0, 20, (rows, length)), labels.masked_fill(torch.rand(rows, length) >= share, ignored)


def flat(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return scores.reshape(-1, CLASSES), labels.reshape(-1)


WEIGHTS = torch.linspace(0.2, 2, CLASSES)

LOSSES: dict[str, Loss] = {
    "mean": lambda scores, labels: F.cross_entropy(*flat(scores, labels)),
    "sum": lambda scores, labels: F.cross_entropy(*flat(scores, labels), reduction="sum"),
    "sum over a number of items": lambda scores, labels: (
        F.cross_entropy(*flat(scores, labels), reduction="sum") / (labels != -100).sum().clamp(min=1)
    ),
    "one loss for each token": lambda scores, labels: F.cross_entropy(*flat(scores, labels), reduction="none"),
    "class weights": lambda scores, labels: F.cross_entropy(*flat(scores, labels), weight=WEIGHTS),
    "label smoothing": lambda scores, labels: F.cross_entropy(*flat(scores, labels), label_smoothing=0.1),
    "smoothing with weights": lambda scores, labels: F.cross_entropy(
        *flat(scores, labels), weight=WEIGHTS, label_smoothing=0.2
    ),
    "classes in the second place": lambda scores, labels: F.cross_entropy(scores.transpose(1, 2), labels),
    "log-likelihood": lambda scores, labels: F.nll_loss(scores.log_softmax(-1).flatten(0, 1), labels.flatten()),
    "log-likelihood of pictures": lambda scores, labels: F.nll_loss(
        scores.log_softmax(-1).unflatten(1, (1, -1)).permute(0, 3, 1, 2).contiguous(), labels[:, None], reduction="sum"
    ),
    "next tokens": lambda scores, labels: F.cross_entropy(*flat(scores[:, :-1], labels[:, 1:])),
    "next tokens, labels padded": lambda scores, labels: F.cross_entropy(
        *flat(scores, F.pad(labels, (0, 1), value=-100)[:, 1:])
    ),
    "two losses of the same scores": lambda scores, labels: (
        F.cross_entropy(*flat(scores, labels)) + F.cross_entropy(*flat(scores, labels.flip(1)), reduction="sum")
    ),
    "scores made sharper": lambda scores, labels: F.cross_entropy(*flat((scores / 0.7).tanh().double(), labels)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_any_form_equals_eagers(name: str) -> None:
    eager = Head(LOSSES[name])
    ours = Rewritten(copy.deepcopy(eager))
    for rows, length, share in [(3, 8, 0.3), (2, 5, 1.0), (4, 7, 0.0), (5, 9, 0.15), (3, 6, 0.6)]:
        assert_as_eager(eager, ours, *batch(rows, length, share))
    assert ours.ran == {"some rows": 5}
    assert len(ours.graphs) == 1


@pytest.mark.parametrize(("reduction", "nothing"), [("mean", torch.nan), ("sum", 0.0)])
def test_without_any_label_the_loss_is_eagers(reduction: str, nothing: float) -> None:
    module = Head(lambda scores, labels: F.cross_entropy(*flat(scores, labels), reduction=reduction))
    ours = rewritten(module, *batch(3, 8, 0.0))
    torch.testing.assert_close(ours(*batch(3, 8, 0.0)), torch.tensor(nothing), equal_nan=True)
    assert ours.kept() == [(2, 24)], "two rows are computed, since graphs for none and one would be others"


@pytest.mark.parametrize("ignored", [0, 3, -1])
def test_another_index_may_be_the_one_that_is_ignored(ignored: int) -> None:
    module = Head(lambda scores, labels: F.cross_entropy(*flat(scores, labels), ignore_index=ignored))
    ids, labels = batch(3, 8, 0.3, ignored)
    ours = rewritten(module, ids, labels)
    assert ours.kept() == [(int((labels != ignored).sum()), 24)]


def test_the_head_works_on_rows_with_a_label_only() -> None:
    ids, labels = batch(4, 8, 0.25)
    ours = rewritten(Head(LOSSES["mean"]), ids, labels)
    assert ours.kept() == [(int((labels != -100).sum()), 32)]
    assert largest(ours) < 32 * 6, "no value of all tokens is left but the draw of the dropout"


def test_without_labels_feature_every_row_is_computed() -> None:
    ours = rewritten(Head(LOSSES["mean"]), *batch(4, 8, 0.25), wishes=SkippableRows(labels=False))
    assert ours.graphs == []
    assert "cross_entropy" in ours.reasons[0]


def test_with_probabilities_for_labels_every_row_is_computed() -> None:
    module = Head(lambda scores, labels: F.cross_entropy(scores, labels.clamp(0)[..., None] / scores.exp()))
    assert "cross_entropy" in rewritten(module, *batch(4, 8, 0.25)).reasons[0]


class OwnLabels(Head):
    """Learns to tell one embedding from the others."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        embedded = self.embed(ids)
        return F.cross_entropy(*flat(self.head(self.body(embedded)), embedded.detach().argmax(-1)))


def test_labels_that_the_model_makes_leave_nothing_out() -> None:
    ours = rewritten(OwnLabels(LOSSES["mean"]), *batch(4, 8, 0.25))
    assert ours.reasons == ["the labels are computed from what the model computes"]


class Pair(nn.Module):
    """A classifier of whole rows that returns its scores; rows without a label count for them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.body(x)[:, 0])
        return torch.cat([F.cross_entropy(scores, labels).view(1), scores.flatten()])


def test_scores_that_are_results_are_those_of_all_rows() -> None:
    ours = rewritten(Pair(), torch.randn(4, 5, 6), torch.tensor([3, -100, 1, 2]))
    assert ours.ran == {"some rows": 1}
    assert ours.kept() == [(4, 20)], "the first of each row"


def test_another_reader_of_the_scores_keeps_all_rows() -> None:
    module = Head(lambda scores, labels: F.cross_entropy(*flat(scores, labels)) + scores.logsumexp(-1).square().mean())
    ours = rewritten(module, *batch(4, 8, 0.25))
    assert ".square().mean()" in ours.reasons[0], "the reason shows the line"


def largest(ours: Rewritten) -> int:
    """Returns the element count of the smaller graph's largest floating-point tensor."""
    made = [n.meta["val"] for n in ours.graph.nodes if n.op == "call_function"]
    sizes = [[int(size) for size in map(hint, value.shape)] for value in made if is_float(value)]
    return max(map(torch.Size, sizes), key=torch.Size.numel).numel()


def is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def hint(size: int | torch.SymInt) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size
