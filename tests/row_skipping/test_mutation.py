"""In-place operators: rows are left out where the mutated tensor has no alias, and never wrongly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ort_accel.row_skipping.mutation import is_in_place
from tests.row_skipping.modules import Attention, first_tokens, keys_of, padded
from tests.row_skipping.rewritten import Rewritten, assert_as_eager, rewritten

Change = Callable[["Changing", Tensor], Tensor]


class Changing(Attention):
    """A layer followed by an in-place operator."""

    def __init__(self, change: Change) -> None:
        super().__init__(first_tokens, keys_of)
        self._change = change

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        return first_tokens(self.attend(self._change(self, self.attend(x, mask)), mask))


def added(module: Changing, x: Tensor) -> Tensor:
    y = module.out(x)
    y += x
    return y


def seen_again_by_its_name(module: Changing, x: Tensor) -> Tensor:
    y = module.out(x)
    y.mul_(0.5)
    y.add_(x, alpha=2).tanh_()
    return y * 3


def behind_dropout(module: Changing, x: Tensor) -> Tensor:
    y = F.dropout(module.out(x), 0.3)
    y += x
    return y


def looked_at_before(module: Changing, x: Tensor) -> Tensor:
    y = x * 2
    before = y.flatten(1).unflatten(1, y.shape[1:]).tanh()
    y += 1
    return y + before


MAKING_NEW: dict[str, Change] = {
    "added": added,
    "seen again by its name": seen_again_by_its_name,
    "behind dropout": behind_dropout,
    "looked at before": looked_at_before,
}


def seen_through_a_view(module: Changing, x: Tensor) -> Tensor:
    y = x * 2
    view = y.transpose(1, 2)
    y += 1
    return view.transpose(1, 2) + y


def a_view_changed(module: Changing, x: Tensor) -> Tensor:
    y = x * 2
    y[:, :, 0].add_(1)
    return y


def what_drops_nothing(module: Changing, x: Tensor) -> Tensor:
    y = x * 2
    z = F.dropout(y, 0.0)
    z += 1
    return y + z


def without_gradient(module: Changing, x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y *= 3
    return y


CHANGING: dict[str, Change] = {
    "seen through a view": seen_through_a_view,
    "a view changed": a_view_changed,
    "what drops nothing": what_drops_nothing,
    "without gradient": without_gradient,
}


@pytest.mark.parametrize("name", MAKING_NEW)
def test_an_unaliased_in_place_operator_becomes_functional(name: str) -> None:
    module = Changing(MAKING_NEW[name])
    ours = Rewritten(module)
    for kept in [(2, 5, 9), (9, 1, 4)]:
        ids, mask = padded(*kept)
        assert_as_eager(module, ours, ids, mask)
        assert {(3, 27), (int(mask.sum()), mask.numel())} == set(ours.kept())
    assert not any(map(is_in_place, ours.proposal.traced.graph.nodes))
    of = ours.proposal.plan.set_of
    whole = [node for node in ours.proposal.traced.graph.nodes if node.target is torch.ops.aten.tanh.default]
    assert all(node in of for node in whole)


@pytest.mark.parametrize("name", CHANGING)
def test_an_aliased_tensor_is_still_mutated(name: str) -> None:
    ours = rewritten(Changing(CHANGING[name]), *padded(2, 5, 9))
    assert any(map(is_in_place, ours.proposal.traced.graph.nodes))
