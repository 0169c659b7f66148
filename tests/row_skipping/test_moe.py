"""A mixture of experts computes needed tokens only, where no pair of token and expert reads another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers.integrations.moe  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F

from tests.row_skipping.modules import WIDTH, Attention, first_tokens, keys_of, padded
from tests.row_skipping.rewritten import Rewritten, padding_left_out, rewritten

EXPERTS, EACH, WIDE = 4, 2, 16


def grouped(x: Tensor, weights: Tensor, order: Order) -> Tensor:
    """The product that transformers captures, since PyTorch's own knows no other type than bfloat16 then."""
    product: Tensor = torch.ops.transformers.grouped_mm_fallback(x, weights, offs=order.ends)
    return product


class Order:
    """Pairs of token and expert, sorted by expert."""

    def __init__(self, chosen: Tensor) -> None:
        self.numbers, self.place = torch.sort(chosen.reshape(-1))
        counts = torch.histc(self.numbers.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        self.ends = torch.cumsum(counts, 0, dtype=torch.int32)

    def back(self, x: Tensor) -> Tensor:
        """Restores the order of a value of each pair."""
        before = torch.empty_like(self.place)
        before[self.place] = torch.arange(self.place.size(0))
        return x[before]


Middle = Callable[["Routed", Tensor, Order], Tensor]
"""Functions between the two products of each expert, on [pairs, WIDE]."""

Whole = Callable[["Routed", Tensor, Tensor, Tensor], Tensor]
"""Implementations of the experts, from tokens, expert ids and routing weights."""


class Routed(Attention):
    """A layer of attention and one of experts."""

    def __init__(self, middle: Middle | None = None, whole: Whole | None = None) -> None:
        super().__init__(first_tokens, keys_of)
        self.again, self.router = Attention(first_tokens, keys_of), nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *s) / 4) for s in ((WIDTH, WIDE), (WIDE, WIDTH)))
        self.bias, self.norm = nn.Parameter(torch.randn(EXPERTS, WIDE)), nn.LayerNorm(WIDE)
        self._middle, self._whole = middle or (lambda m, x, order: F.silu(x)), whole or sorted_by_expert

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.attend(self.embed(ids), mask)
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(self.router(tokens).softmax(-1), EACH, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        x = x + self._whole(self, tokens, chosen, weights).view(x.shape)
        return first_tokens(self.again.attend(x, mask))


def sorted_by_expert(m: Routed, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = Order(chosen)
    x = grouped(tokens[order.place // EACH], m.up, order)
    x = grouped(m._middle(m, x, order), m.down, order)
    x = order.back(x * weights.reshape(-1)[order.place].unsqueeze(-1))
    return x.view(len(tokens), EACH, WIDTH).sum(dim=1)


def gated(m: Routed, x: Tensor, order: Order) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat([F.silu(one) * other, one.clamp(max=0.5)], -1)


def in_place(m: Routed, x: Tensor, order: Order) -> Tensor:
    x.add_(m.bias[order.numbers])
    return x * 2


def without_gradients(m: Routed, x: Tensor, order: Order) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True)
    return F.silu(x) / scale


BY_PAIR: dict[str, Middle] = {
    "an activation": lambda m, x, order: F.silu(x),
    "halves": gated,
    "a bias of the expert": lambda m, x, order: F.gelu(x + m.bias[order.numbers]),
    "a bias in place": in_place,
    "a norm": lambda m, x, order: m.norm(x),
    "something detached": lambda m, x, order: F.silu(x) / x.detach().abs().amax(-1, keepdim=True),
    "another type": lambda m, x, order: x.double().tanh().float(),
    "how many pairs there are in all": lambda m, x, order: x / order.numbers.size(0),
    "a step that is read twice": lambda m, x, order: x * x.sum(-1, keepdim=True),
}

ACROSS_PAIRS: dict[str, Middle] = {
    "softmax over pairs": lambda m, x, order: x.softmax(0),
    "the largest of all": lambda m, x, order: x / x.abs().amax(),
    "the next pair": lambda m, x, order: x + x.roll(1, 0),
    "how many an expert has": lambda m, x, order: x / (1 + order.ends.float().diff(prepend=torch.zeros(1)).amax()),
    "a value of each place": lambda m, x, order: x + torch.arange(x.size(0))[:, None] / 50,
    "pairs in another order": lambda m, x, order: x + order.back(x),
    "dropout": lambda m, x, order: F.dropout(x, 0.5),
    "something without gradients": without_gradients,
}


def twice(m: Routed, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = Order(chosen)
    x = grouped(tokens[order.place // EACH], m.up, order)
    x = grouped(F.silu(x), m.down, order)
    x = order.back(x)
    return x.view(len(tokens), EACH, WIDTH).sum(dim=1) + x.mean(0)


def by_half_the_place(m: Routed, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = Order(chosen)
    x = grouped(tokens[order.place // (2 * EACH)], m.up, order)
    x = order.back(grouped(F.silu(x), m.down, order))
    return x.view(len(tokens), EACH, WIDTH).sum(dim=1)


def left_in_order(m: Routed, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = Order(chosen)
    x = grouped(tokens[order.place // EACH], m.up, order)
    x = grouped(F.silu(x), m.down, order)[order.place]
    return x.view(len(tokens), EACH, WIDTH).sum(dim=1)


OTHERS: dict[str, Whole] = {
    "pairs that something else reads": twice,
    "another token's row": by_half_the_place,
    "pairs that stay in order": left_in_order,
}


@pytest.mark.parametrize("name", BY_PAIR)
def test_padding_goes_to_no_expert(name: str) -> None:
    assert are_some(padding_left_out(Routed(BY_PAIR[name])))


@pytest.mark.parametrize("middle", ACROSS_PAIRS)
def test_pairs_that_depend_on_others_are_all_computed(middle: str) -> None:
    ours = rewritten(Routed(ACROSS_PAIRS[middle]), *padded(2, 5, 9))
    assert not ours.graphs or not are_some(ours)


@pytest.mark.parametrize("name", OTHERS)
def test_other_orders_of_the_pairs_compute_all_tokens(name: str) -> None:
    ours = rewritten(Routed(whole=OTHERS[name]), *padded(2, 5, 9))
    assert not ours.graphs or not are_some(ours)


def are_some(ours: Rewritten) -> bool:
    """True if the router works on some tokens only."""
    (chosen,) = ours.proposal.traced.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)
    return chosen in ours.proposal.plan.set_of


def test_their_work_counts_as_saved() -> None:
    ids, mask = padded(2, 5, 9)
    ours = rewritten(Routed(), ids, mask)
    work = ours.proposal.work_of
    experts_work = 2 * mask.numel() * EACH * WIDTH * WIDE * 2
    assert sum(work.values()) > experts_work
