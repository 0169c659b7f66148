"""Attention over rows, sequence by sequence: with PyTorch's fused kernel, or as products where that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

FULL, CAUSAL, MASKED = range(3)
"""How a sequence attends, the last number of its span: each query to all keys, to those up to it, or as a mask says."""


class _Sequence(NamedTuple):
    """One sequence: its rows among those of the queries and of the keys, and what is known of their pairs."""

    queries: slice
    keys: slice
    is_causal: bool
    mask: Tensor | None
    """What is added to the scores."""
    dropped: Tensor | None


@dataclass(frozen=True)
class _Pairs:
    """Where queries and keys attend to each other."""

    spans: Tensor
    query_rows: Tensor
    key_rows: Tensor
    mask: Tensor | None
    kept: Tensor | None

    def sequences(self, dtype: torch.dtype) -> Iterator[_Sequence]:
        """All sequences that have queries and keys."""
        dropped = None if self.kept is None else ~self.kept
        for number, (first_query, end_query, first_key, end_key, kind) in enumerate(self.spans.tolist()):
            queries, keys = slice(first_query, end_query), slice(first_key, end_key)
            if first_query == end_query or first_key == end_key:
                continue
            rows = self.query_rows[queries], self.key_rows[keys]
            mask = None if kind != MASKED or self.mask is None else _added(_part(self.mask, number, *rows), dtype)
            here = None if dropped is None else _part(dropped, number, *rows)
            yield _Sequence(queries, keys, kind == CAUSAL, mask, here)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    keep: float,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """The result, and what only the fused kernel keeps for its gradient: the logarithm of each row's sum."""
    pairs = _Pairs(spans, query_rows, key_rows, mask, kept)
    if not _is_fused(query, kept):
        return _by_products(query, key, value, pairs, keep, scale)
    out = query.new_zeros((*query.shape[:2], value.shape[2]))
    logsumexp = query.new_zeros(query.shape[:2], dtype=_wide(query))
    for q, k, is_causal, added, _ in pairs.sequences(query.dtype):
        part, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_batch_of_one, (query[q], key[k], value[k])), is_causal=is_causal, attn_mask=added, scale=scale
        )
        out[q] = part[0].transpose(0, 1)
        logsumexp[q] = sums[0].transpose(0, 1)
    return out, logsumexp


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    spans: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    keep: float,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    pairs = _Pairs(spans, query_rows, key_rows, mask, kept)
    if not _is_fused(query, kept):
        return _by_products_backward(grad, query, key, value, pairs, keep, scale)
    grads = query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    for q, k, is_causal, added, _ in pairs.sequences(query.dtype):
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_batch_of_one, (grad[q], query[q], key[k], value[k], out[q])),
            logsumexp[q].transpose(0, 1).unsqueeze(0),
            0.0,
            is_causal=is_causal,
            attn_mask=added,
            scale=scale,
        )
        for whole, where, part in zip(grads, (q, k, k), parts, strict=True):
            whole[where] = part[0].transpose(0, 1)
    return grads


def _is_fused(query: Tensor, kept: Tensor | None) -> bool:
    """Whether PyTorch has a kernel that is fast for short sequences: it has one for the CPU, without dropout."""
    return query.device.type == "cpu" and kept is None


def _batch_of_one(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).unsqueeze(0)


# As products. Sums are made in single precision at the least, and what can be done for all sequences at once is.


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, pairs: _Pairs, keep: float, scale: float | None
) -> tuple[Tensor, Tensor]:
    wide = _wide(query)
    scaled, keys, values = query.to(wide) * _scale(query, scale), key.to(wide), value.to(wide) * _inverse(keep)
    out = scaled.new_zeros((*query.shape[:2], value.shape[2]))
    for sequence in pairs.sequences(wide):
        q, k = sequence.queries, sequence.keys
        weights = _dropped(_weights(scaled[q], keys[k], sequence), sequence)
        out[q] = torch.bmm(weights, values[k].transpose(0, 1)).transpose(0, 1)
    return out.to(query.dtype), out.new_zeros(query.shape[:2])


def _by_products_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, pairs: _Pairs, keep: float, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(query)
    scaled, keys, values = query.to(wide) * _scale(query, scale), key.to(wide), value.to(wide) * _inverse(keep)
    grads = torch.zeros_like(scaled), torch.zeros_like(keys), torch.zeros_like(values)
    incoming = grad.to(wide)
    for sequence in pairs.sequences(wide):
        q, k = sequence.queries, sequence.keys
        weights, slope = _weights(scaled[q], keys[k], sequence), incoming[q].transpose(0, 1)
        change = _dropped(torch.bmm(slope, values[k].permute(1, 2, 0)), sequence)
        change = aten._softmax_backward_data(change, weights, -1, wide)
        grads[0][q] = torch.bmm(change, keys[k].transpose(0, 1)).transpose(0, 1)
        grads[1][k] = torch.bmm(change.mT, scaled[q].transpose(0, 1)).transpose(0, 1)
        grads[2][k] = torch.bmm(_dropped(weights, sequence).mT, slope).transpose(0, 1)
    grads[0].mul_(_scale(query, scale))
    grads[2].mul_(_inverse(keep))
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


def _weights(query: Tensor, key: Tensor, sequence: _Sequence) -> Tensor:
    """How much each query looks at each key, [heads, queries, keys]."""
    scores = torch.bmm(query.transpose(0, 1), key.permute(1, 2, 0))
    if sequence.is_causal:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu_(1), -torch.inf)
    elif sequence.mask is not None:
        scores += sequence.mask[0]
    return scores.softmax(-1)


def _dropped(weights: Tensor, sequence: _Sequence) -> Tensor:
    return weights if sequence.dropped is None else weights.masked_fill_(sequence.dropped[0], 0.0)


def _wide(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _inverse(keep: float) -> float:
    """What a dropout multiplies by."""
    return 1 / keep if keep else 0.0


# Parts of masks


def _part(pairs: Tensor, number: int, query_rows: Tensor, key_rows: Tensor) -> Tensor:
    """What [batch, heads, queries, keys] has for one sequence; each but the last size may be 1."""
    part = pairs[number if pairs.shape[0] > 1 else 0]
    if part.shape[1] > 1:
        part = _chosen(part, 1, query_rows)
    return _chosen(part, 2, key_rows).unsqueeze(0)


def _chosen(part: Tensor, dim: int, rows: Tensor) -> Tensor:
    """Without a copy where the rows follow each other, as they do unless padding stands between tokens."""
    length = part.shape[dim]
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return part.narrow(dim, first % length, len(rows))
    return part.index_select(dim, rows % length)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores."""
    if mask.dtype == torch.bool:
        return mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.to(dtype)
