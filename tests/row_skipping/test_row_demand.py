"""The analysis finds which rows are read, and why a graph cannot leave rows out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ort_accel.row_skipping.row_sets import AllRows, SomeRows
from tests.row_skipping.modules import Attention, first_tokens, keys_of, padded
from tests.row_skipping.rewritten import rewritten


def test_an_unread_value_is_not_computed() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            F.dropout(self.unused(x), 0.5)
            return self.used(x)[:, 0]

    ours = rewritten(Unread(), torch.randn(3, 5, 4))
    names = [str(node.target) for node in ours.graph.nodes]
    assert sum("linear" in name for name in names) == 1
    assert sum("kept" in name for name in names) == 1, "its random numbers are drawn all the same"


def test_rows_of_queries_and_of_keys_are_told_apart() -> None:
    demands = rewritten(Attention(first_tokens, keys_of), *padded(2, 5, 9)).proposal.plan.demands
    (attention,) = demands.attentions.values()
    assert demands.rows(attention.query).dims == demands.rows(attention.key).dims == (0, 2)
    assert demands.rows(attention.query).atoms != demands.rows(attention.key).atoms
    assert isinstance(demands.of[attention.mask], AllRows)


class InPlace(nn.Module):
    """Mutates a value after it was computed, and reads the first tokens."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self._change = change

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self._change(hidden)
        return self.second(hidden)[:, 0]


@pytest.mark.parametrize(
    "change",
    [lambda x: F.dropout(x, 0.5, inplace=True), lambda x: x[:, 1].zero_(), lambda x: x.transpose(0, 1)[0].mul_(2)],
    ids=["at random", "a part", "a view of a view"],
)
def test_a_value_that_is_changed_in_place_is_computed_whole(change: Callable[[Tensor], object]) -> None:
    ours = rewritten(InPlace(change), torch.randn(3, 5, 4))
    assert ours.kept() == [(3, 15)]
    ranks = [n.meta["val"].ndim for n in ours.graph.nodes if "linear" in str(n.target)]
    assert ranks == [3, 2], "what follows has the rows that are read"


def test_a_graph_that_changes_its_input_stays_whole() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return self.linear(x)[:, 0]

    ours = rewritten(Counting(), torch.randn(3, 5, 4))
    assert ours.reasons == ["the graph changes one of its inputs in place"]
    assert ours.module.seen == 1


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda x: x.mean(1), "aten.mean.dim (test_row_demand.py"),
        (lambda x: x, "aten.sin.default (test_row_demand.py"),
        (lambda x: x.cumsum(1)[:, 0], "aten.cumsum.default (test_row_demand.py"),
        (lambda x: x.roll(1, 1)[:, 0], "aten.roll.default (test_row_demand.py"),
    ],
    ids=["a mean", "all", "a running sum", "neighbours"],
)
def test_the_reason_names_what_reads_every_row(read: Callable[[Tensor], Tensor], said: str) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return read(self.linear(x).sin())

    (reason,) = rewritten(Reading(), torch.randn(3, 5, 4)).reasons
    assert reason.startswith("every row is read, by ")
    assert said in reason


def test_a_graph_without_products_is_not_worth_it() -> None:
    class Light(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()[:, 0]

    assert rewritten(Light(), torch.randn(3, 5, 4)).reasons == ["no matrix product is large enough to matter"]


def test_several_readers_read_the_union_of_their_rows() -> None:
    class Readers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            return torch.cat([hidden[:, 0], hidden[:, 2], hidden[:, 0].sin()])

    ours = rewritten(Readers(), torch.randn(3, 5, 4))
    linear = next(n for n in ours.proposal.traced.graph.nodes if "linear" in str(n.target))
    some = ours.proposal.plan.demands.rows(linear)
    assert isinstance(some, SomeRows)
    assert len(some.atoms) == 2
    assert (6, 15) in ours.kept()
