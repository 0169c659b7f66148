"""Labels and masks that a model changes in place are known before it runs, or nothing is left out on their account."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.row_skipping.modules import VOCABULARY, WIDTH, Attention, first_tokens, keys_of, padded
from tests.row_skipping.rewritten import Rewritten, assert_as_eager

LENGTHS = [(2, 5, 9), (9, 1, 4)]


def as_eager(model: nn.Module, *, with_labels: bool = False) -> Rewritten:
    """Compares batches of padded tokens with eager mode; `with_labels`: valid tokens are labels, in place of a mask."""
    ours = Rewritten(model)
    for lengths in LENGTHS:
        ids, mask = padded(*lengths)
        assert_as_eager(model, ours, ids, ids.masked_fill(mask == 0, -100) if with_labels else mask)
    return ours


class Head(nn.Module):
    """Reads labels in a way of its own."""

    def __init__(self, labels: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self._labels = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY), labels

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), self._labels(labels).reshape(-1))


def shifted_by_a_write(labels: Tensor) -> Tensor:
    found = torch.full_like(labels, -100)
    found[:, :-1] = labels[:, 1:]
    return found


def without_the_prompt(labels: Tensor) -> Tensor:
    found = labels.clone()
    found[:, :2] = -100
    return found


@pytest.mark.parametrize("labels", [shifted_by_a_write, without_the_prompt])
def test_labels_that_a_model_writes_into_are_those_after_the_write(
    labels: Callable[[Tensor], Tensor],
) -> None:
    model = Head(labels)
    ours = Rewritten(model)
    for lengths in LENGTHS:
        ids, mask = padded(*lengths)
        given = ids.masked_fill(mask == 0, -100)
        assert_as_eager(model, ours, ids, given)
        assert ours.kept()[-1][0] == int((labels(given) != -100).sum())
    assert ours.ran == {"some rows": len(LENGTHS)}


def with_open_columns(mask: Tensor) -> Tensor:
    found = keys_of(mask).clone()
    found[..., 0:1] = True
    found[:, :, :, -2:] = True
    return found


def test_a_mask_that_a_model_opens_in_place_hides_what_is_left() -> None:
    model = Attention(first_tokens, with_open_columns)
    ours = Rewritten(model)
    for lengths in LENGTHS:
        ids, mask = padded(*lengths)
        assert_as_eager(model, ours, ids, mask)
        assert ours.kept()[-1][0] == int(with_open_columns(mask).sum())


class ReadTwice(Attention):
    """Attends once before the mask is changed, and once behind."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x, pairs = self.embed(ids), keys_of(mask).clone()
        for is_last in (False, True):
            if is_last:
                pairs[..., -3:] = True
            with torch.set_grad_enabled(is_last):  # the backward could not read what was changed
                q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
                found = F.scaled_dot_product_attention(q, k, v, attn_mask=pairs)
            x = x + found.transpose(1, 2).flatten(2)
        return x[:, 0]


class FromTheModel(Attention):
    """Writes what the model has computed into the mask."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x, pairs = self.embed(ids), keys_of(mask).clone()
        pairs[:, 0, 0, :] = pairs[:, 0, 0, :] | (x.sum(-1) > 0)
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=pairs).transpose(1, 2).flatten(2)[:, 0]


@pytest.mark.parametrize("kind", [ReadTwice, FromTheModel])
def test_where_the_pairs_are_not_known_all_keys_are_read_and_the_mask_applies(kind: type[Attention]) -> None:
    model = kind(first_tokens, keys_of)
    as_eager(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ones_and_zeros_that_are_added_to_scores_hide_nothing(dtype: torch.dtype) -> None:
    model = Attention(first_tokens, lambda mask: keys_of(mask).to(dtype)).to(dtype)
    as_eager(model)


def test_an_embedding_whose_gradient_counts_ids_reads_all_of_them() -> None:
    model = Head(lambda labels: labels)
    model.embed = nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=True)
    as_eager(model, with_labels=True)


class WithSignal(Attention):
    """Adds a buffer to its input that it has written a number of the layer into."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        signal = torch.zeros_like(x)
        for layer in range(2):
            signal[..., 0] = layer + 1
            x = self.attend(x + signal, mask)
        return x[:, 0]


def test_rows_of_a_buffer_that_is_written_again_are_read_again() -> None:
    model = WithSignal(first_tokens, keys_of)
    ours = as_eager(model)
    assert ours.ran["some rows"] == len(LENGTHS)


def ahead_in_one_head(mask: Tensor) -> Tensor:
    length = mask.shape[1]
    ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
    heads = torch.stack([torch.ones_like(ahead), ahead])[None] & keys_of(mask)
    return torch.zeros(heads.shape).masked_fill(~heads, torch.finfo(torch.float32).min)


def test_a_head_that_hides_all_keys_of_a_query_reads_padding_as_in_eager_mode() -> None:
    model = Attention(lambda x: x[:, -1], ahead_in_one_head)
    as_eager(model)


class Scaled(Head):
    """Multiplies scores of tokens with a number in a type of its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__(lambda labels: labels)
        self.factor = nn.Parameter(torch.full(shape, 1.7, dtype=torch.float64))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.embed(ids).sum(-1) * self.factor
        return (scores * (labels != -100)).sum()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_number_promotes_types_by_its_shape(shape: tuple[int, ...]) -> None:
    model = Scaled(*shape)
    as_eager(model, with_labels=True)


class LastTokens(Head):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.embed(ids))
        return F.cross_entropy(scores[:, -12:-3].flatten(0, 1), labels[:, 3:].reshape(-1)[: len(ids) * 6])


def test_a_slice_from_the_end_may_begin_before_the_first_token() -> None:
    model = LastTokens(lambda labels: labels)
    as_eager(model, with_labels=True)


class WithUnread(Attention):
    """Attends once more, with dropout, and reads nothing of it."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3)
        return F.dropout(self.attend(x, mask), 0.2)[:, 0]


def test_an_attention_that_nobody_reads_draws_its_mask() -> None:
    model = WithUnread(first_tokens, keys_of)
    ours = as_eager(model)
    assert ours.ran["some rows"] == len(LENGTHS)
