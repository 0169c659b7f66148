"""Random small modules, of parts that keep tokens apart and parts that mix them, equal eager on any batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.row_skipping.rewritten import Rewritten, assert_as_eager

WIDTH, VOCABULARY, LONGEST = 8, 11, 16

Layer = Callable[["Parts", Tensor, Tensor], Tensor]


class Parts(nn.Module):
    """Parameters that the layers of a module share."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, VOCABULARY)


def heads(parts: Parts, x: Tensor) -> list[Tensor]:
    batch, length, _ = x.shape
    split = parts.qkv(x).view(batch, length, 3, 2, WIDTH // 2)
    return [part.transpose(1, 2) for part in split.unbind(2)]


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attention(parts: Parts, x: Tensor, mask: Tensor) -> Tensor:
    return x + joined(F.scaled_dot_product_attention(*heads(parts, x), attn_mask=mask[:, None, None, :].bool()))


def causal_attention(parts: Parts, x: Tensor, mask: Tensor) -> Tensor:
    square = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return x + joined(
        F.scaled_dot_product_attention(*heads(parts, x), attn_mask=square & mask[:, None, None, :].bool())
    )


def attention_with_scores(parts: Parts, x: Tensor, mask: Tensor) -> Tensor:
    scores = (1 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
    return x + joined(F.scaled_dot_product_attention(*heads(parts, x), attn_mask=scores))


def attention_with_dropout(parts: Parts, x: Tensor, mask: Tensor) -> Tensor:
    allowed = mask[:, None, None, :].bool()
    return x + joined(F.scaled_dot_product_attention(*heads(parts, x), attn_mask=allowed, dropout_p=0.3))


def attention_to_all(parts: Parts, x: Tensor, mask: Tensor) -> Tensor:
    return x + joined(F.scaled_dot_product_attention(*heads(parts, x)))


def attention_to_a_window(parts: Parts, x: Tensor, mask: Tensor) -> Tensor:
    place = torch.arange(x.shape[1])
    near = (place[:, None] - place[None, :]).abs() <= 2
    allowed = near & mask[:, None, None, :].bool() | torch.eye(x.shape[1], dtype=torch.bool)
    return x + joined(F.scaled_dot_product_attention(*heads(parts, x), attn_mask=allowed))


def batch_statistics(parts: Parts, x: Tensor, mask: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    return ((flat - flat.mean(0)) / (flat.var(0, unbiased=False) + 0.1).sqrt()).view_as(x)


APART: dict[str, Layer] = {
    "linear": lambda parts, x, mask: x + F.gelu(parts.linear(x)),
    "norm": lambda parts, x, mask: parts.norm(x),
    "dropout": lambda parts, x, mask: F.dropout(x, 0.3),
    "transposed dropout": lambda parts, x, mask: F.dropout(x.transpose(1, 2), 0.3).transpose(1, 2),
    "masked": lambda parts, x, mask: x * mask[..., None],
    "filled": lambda parts, x, mask: x.masked_fill(mask[..., None] == 0, 0.5),
    "places again": lambda parts, x, mask: x + parts.places(torch.arange(x.shape[1])),
    "scaled by place": lambda parts, x, mask: x * torch.arange(x.shape[1])[None, :, None].cos(),
    "halves": lambda parts, x, mask: torch.cat([x[..., WIDTH // 2 :], x[..., : WIDTH // 2].sin()], -1),
    "flattened": lambda parts, x, mask: parts.linear(x.reshape(-1, WIDTH)).view(x.shape),
    "softmax over width": lambda parts, x, mask: x.softmax(-1) + x.mean(-1, keepdim=True),
    "length first": lambda parts, x, mask: parts.linear(x.transpose(0, 1)).transpose(0, 1),
    "attention": attention,
    "causal attention": causal_attention,
    "attention with scores": attention_with_scores,
    "attention with dropout": attention_with_dropout,
    "attention to a window": attention_to_a_window,
}
"""Layers in which no real token is changed by a padded one."""

MIXING: dict[str, Layer] = {
    "attention to all": attention_to_all,
    "convolution": lambda parts, x, mask: x + parts.conv(x.transpose(1, 2)).transpose(1, 2),
    "running sum": lambda parts, x, mask: x.cumsum(1) / 4,
    "batch statistics": batch_statistics,
    "softmax over tokens": lambda parts, x, mask: x + x.softmax(1),
    "next token": lambda parts, x, mask: x + x.roll(-1, 1),
    "shifted": lambda parts, x, mask: F.pad(x[:, :-1], (0, 0, 1, 0)) + x,
    "mean added": lambda parts, x, mask: x + x.mean(1, keepdim=True),
    "row above": lambda parts, x, mask: x + x.roll(1, 0),
    "sorted": lambda parts, x, mask: x.sort(1).values,
    "reversed": lambda parts, x, mask: x + x.flip(1),
}
"""Layers that read padded positions."""

READ_OUTS: dict[str, Callable[[Parts, Tensor, Tensor, Tensor], Tensor]] = {
    "first token": lambda parts, x, mask, labels: parts.head(x[:, 0]).sin().sum(),
    "last place": lambda parts, x, mask, labels: parts.head(x[:, -1]).sin().sum(),
    "first two": lambda parts, x, mask, labels: parts.head(x[:, :2]).sin().sum(),
    "last real token": lambda parts, x, mask, labels: parts.head(
        x[torch.arange(x.shape[0]), (mask.sum(1) - 1).clamp(min=0)]
    ).sum(),
    "mean": lambda parts, x, mask, labels: parts.head(x.mean(1)).sin().sum(),
    "mean of real tokens": lambda parts, x, mask, labels: (
        parts.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)).sin().sum()
    ),
    "largest": lambda parts, x, mask, labels: parts.head(x).amax((1, 2)).sum(),
    "labelled tokens": lambda parts, x, mask, labels: F.cross_entropy(parts.head(x).flatten(0, 1), labels.flatten()),
    "sum over labelled tokens": lambda parts, x, mask, labels: F.cross_entropy(
        parts.head(x).transpose(1, 2), labels, reduction="sum"
    ),
    "next tokens": lambda parts, x, mask, labels: F.cross_entropy(
        parts.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)
    ),
    "labelled tokens and the mean": lambda parts, x, mask, labels: (
        F.cross_entropy(parts.head(x).flatten(0, 1), labels.flatten(), reduction="sum") + x.mean()
    ),
    "labelled tokens and the first": lambda parts, x, mask, labels: (
        F.cross_entropy(parts.head(x).flatten(0, 1), labels.flatten(), reduction="sum") + x[:, 0].sum()
    ),
}


class Module(nn.Module):
    def __init__(self, layers: list[str], read_out: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self._layers, self._read_out = Parts(), layers, read_out

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.parts.tokens(ids) + self.parts.places(torch.arange(ids.shape[1]))
        for name in self._layers:
            x = (APART | MIXING)[name](self.parts, x, mask)
        return READ_OUTS[self._read_out](self.parts, x, mask, labels)


@st.composite
def batches(draw: st.DrawFn) -> list[Tensor]:
    """Ids, mask and labels, where any row may be padded in part or as a whole, on either side."""
    rows, length = draw(st.integers(2, 5)), draw(st.integers(3, LONGEST))
    kept = torch.tensor(draw(st.lists(st.integers(0, length), min_size=rows, max_size=rows)))[:, None]
    place = torch.arange(length)
    mask = (place < kept) if draw(st.booleans()) else (place >= length - kept)
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    ids, labels = (torch.randint(0, VOCABULARY, mask.shape, generator=random) for _ in range(2))
    is_labelled = torch.rand(mask.shape, generator=random) < draw(st.sampled_from([0, 0.3, 1]))
    everywhere = draw(st.integers(0, 5)) == 0  # now and then padding is labelled, too
    return [ids, mask.long(), labels.where(is_labelled & (mask | everywhere), -100)]


layers = st.lists(st.sampled_from([*APART, *APART, *MIXING]), min_size=1, max_size=5)


@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(layers, st.sampled_from(list(READ_OUTS)), st.lists(batches(), min_size=2, max_size=3))
def test_a_random_module_equals_eager(layers: list[str], read_out: str, batches: list[Any]) -> None:
    torch.compiler.reset()
    module = Module(layers, read_out)
    ours = Rewritten(copy.deepcopy(module))
    for batch in batches:
        assert_as_eager(module, ours, *batch)
