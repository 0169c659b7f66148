"""The tables of a batch tell which rows it has, and whether the smaller graph may run."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ort_accel.kernels.attention_packed import CAUSAL, FULL, MASKED
from tests.row_skipping.modules import Attention, first_tokens, keys_of, padded
from tests.row_skipping.rewritten import Rewritten, rewritten


def inputs_of(read: object, mask: object, *given: Tensor, **how: object) -> tuple[Rewritten, list[Tensor]]:
    """Returns a module that has run, and the inputs of its graph."""
    seen: list[list[Tensor]] = []

    class Seen(Rewritten):
        def _run(self, module, proposal, smaller, holds):
            run = super()._run(module, proposal, smaller, holds)
            return lambda *inputs: (seen.append(list(inputs)), run(*inputs))[1]

    module = Attention(read, mask, **how)
    ours = Seen(module)
    ours(*given)
    return ours, seen[-1]


def test_gather_and_inverse_indices_undo_each_other() -> None:
    ours, inputs = inputs_of(first_tokens, keys_of, *padded(2, 5, 9))
    batch = ours.proposal.front(inputs)
    for gather, inverse in zip(batch.gather_indices, batch.inverse_indices, strict=True):
        assert torch.equal(inverse[gather], torch.arange(len(gather)))
        assert int((inverse == -1).sum()) == len(inverse) - len(gather)
        assert torch.equal(gather, gather.sort().values)


def test_spans_give_the_queries_and_keys_of_each_sequence() -> None:
    ours, inputs = inputs_of(first_tokens, keys_of, *padded(2, 5, 9))
    (spans,) = ours.proposal.front(inputs).spans
    assert spans.tolist() == [[0, 1, 0, 2, FULL], [1, 2, 2, 7, FULL], [2, 3, 7, 16, FULL]]


def test_spans_tell_full_causal_and_masked_sequences_apart() -> None:
    def stairs(mask: Tensor) -> Tensor:
        return keys_of(mask) & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()

    def holes(mask: Tensor) -> Tensor:
        place = torch.arange(mask.shape[1])
        return stairs(mask) & ((place[:, None] + place) % 3 != 1) | torch.eye(mask.shape[1], dtype=torch.bool)

    def labelled(x: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        place = torch.arange(length).expand(rows, length)
        return F.cross_entropy(x.flatten(0, 1), (place % 8).masked_fill(place == length - 1, -100).flatten())

    kinds = {}
    for name, mask in {"all": keys_of, "stairs": stairs, "holes": holes}.items():
        ours, inputs = inputs_of(labelled, mask, *padded(9, 9))
        kinds[name] = ours.proposal.front(inputs).spans[0][:, 4].tolist()
    assert kinds == {"all": [FULL] * 2, "stairs": [CAUSAL] * 2, "holes": [MASKED] * 2}


def test_without_tables_only_rows_are_counted() -> None:
    ours, inputs = inputs_of(first_tokens, keys_of, *padded(2, 5, 9))
    batch = ours.proposal.front(inputs, with_tables=False)
    assert batch.tables == []
    assert batch.densities == [(3, 27), (16, 27)]
    assert batch.fits


def test_a_query_without_keys_does_not_fit() -> None:
    ours, inputs = inputs_of(first_tokens, keys_of, *padded(2, 0, 9))
    batch = ours.proposal.front(inputs)
    assert not batch.fits
    assert batch.tables == batch.densities == []


def test_an_example_has_the_form_of_true_tables() -> None:
    ours, inputs = inputs_of(first_tokens, keys_of, *padded(2, 5, 9))
    true, example = ours.proposal.front(inputs).tables, ours.proposal.front.example(inputs)
    assert [(t.dtype, t.ndim, t.shape[1:]) for t in example] == [(t.dtype, t.ndim, t.shape[1:]) for t in true]
    assert [len(places) for places in example[2:4]] == [27, 27]


def test_fewer_rows_need_less_work() -> None:
    ours, inputs = inputs_of(first_tokens, keys_of, *padded(2, 5, 9))
    proposal = ours.proposal
    few, all_rows = proposal.needed(proposal.front(inputs)), proposal.work
    assert 0 < few < 0.8 * all_rows
    inputs = inputs_of(first_tokens, keys_of, *padded(2, 0, 9))[1]
    assert proposal.needed(proposal.front(inputs)) == all_rows, "a batch that does not fit needs all"


def test_each_loss_has_its_own_labels() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
            one, two = self.one(x).flatten(0, 1), self.two(x).flatten(0, 1)
            return F.cross_entropy(one, first.flatten()) + F.cross_entropy(two, second.flatten(), ignore_index=0)

    torch.manual_seed(0)
    first, second = torch.randint(0, 6, (3, 7)), torch.randint(0, 6, (3, 7))
    first[:, ::2] = -100
    ours = rewritten(TwoHeads(), torch.randn(3, 7, 6), first, second)
    assert {(9, 21), (int((second != 0).sum()), 21)} < set(ours.kept())
