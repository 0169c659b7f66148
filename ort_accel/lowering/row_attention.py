"""Attention over rows, sequence by sequence: with PyTorch's fused kernel, or as products where that cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

FULL, CAUSAL, MASKED = range(3)
"""How a sequence attends, the last number of its span: each query to all keys, to those up to it, or as a mask says."""


class _Run(NamedTuple):
    """Sequences that follow each other and are alike: their rows, and what is known of their pairs."""

    sequences: int
    queries: slice
    keys: slice
    is_causal: bool
    mask: Tensor | None
    """What is added to the scores."""
    dropped: Tensor | None


class _Span(NamedTuple):
    """One sequence, as it is in the table of spans."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int
    kind: int

    @property
    def is_empty(self) -> bool:
        return self.pairs == 0

    @property
    def pairs(self) -> int:
        return (self.end_query - self.first_query) * (self.end_key - self.first_key)


@dataclass(frozen=True)
class _Pairs:
    """Where queries and keys attend to each other."""

    spans: Tensor
    query_rows: Tensor
    key_rows: Tensor
    mask: Tensor | None
    kept: Tensor | None

    def runs(self, dtype: torch.dtype, most: int | None = None) -> Iterator[_Run]:
        """All sequences that have queries and keys. A batch without padding is one run, or several where a run is to
        have so many pairs at most."""
        spans = [_Span(*span) for span in self.spans.tolist()]
        for _, group in groupby(range(len(spans)), key=lambda number: self._form(number, spans[number])):
            numbers = list(group)
            first = spans[numbers[0]]
            if first.is_empty:
                continue
            size = len(numbers) if most is None else max(1, most // first.pairs)
            for start in range(0, len(numbers), size):
                yield self._run(numbers[start : start + size], spans, dtype)

    def _run(self, numbers: Sequence[int], spans: Sequence[_Span], dtype: torch.dtype) -> _Run:
        first, last = spans[numbers[0]], spans[numbers[-1]]
        rows = self.query_rows[first.first_query : first.end_query], self.key_rows[first.first_key : first.end_key]
        is_masked = first.kind == MASKED and self.mask is not None
        return _Run(
            len(numbers),
            slice(first.first_query, last.end_query),
            slice(first.first_key, last.end_key),
            first.kind == CAUSAL,
            _added(_part(self.mask, numbers, *rows), dtype) if is_masked else None,  # type: ignore[arg-type]
            None if self.kept is None else ~_part(self.kept, numbers, *rows),
        )

    def _form(self, number: int, span: _Span) -> Any:
        """What alike sequences have in common: their places, if these follow each other. Others are alone."""
        places = []
        for rows, first, end, of in (
            (self.query_rows, span.first_query, span.end_query, 2),
            (self.key_rows, span.first_key, span.end_key, 3),
        ):
            if first == end:
                return number
            start, stop = int(rows[first]), int(rows[end - 1])
            if stop - start + 1 != end - first:
                return number
            lengths = [pairs.shape[of] for pairs in (self.mask, self.kept) if pairs is not None]
            places.append((end - first, [start % length for length in lengths]))
        return span.kind, places


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
    for count, q, k, is_causal, added, _ in pairs.runs(query.dtype):
        given = (_batch(item, count) for item in (query[q], key[k], value[k]))
        how = {"is_causal": is_causal, "attn_mask": added, "scale": scale}
        part, sums = aten._scaled_dot_product_flash_attention_for_cpu(*given, **how)
        out[q] = part.transpose(1, 2).flatten(0, 1)
        logsumexp[q] = sums.transpose(1, 2).flatten(0, 1)
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
    for count, q, k, is_causal, added, _ in pairs.runs(query.dtype):
        given = (_batch(item, count) for item in (grad[q], query[q], key[k], value[k], out[q]))
        sums, how = _batch(logsumexp[q], count), {"is_causal": is_causal, "attn_mask": added, "scale": scale}
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, sums, 0.0, **how)
        for whole, where, part in zip(grads, (q, k, k), parts, strict=True):
            whole[where] = part.transpose(1, 2).flatten(0, 1)
    return grads


def _is_fused(query: Tensor, kept: Tensor | None) -> bool:
    """Whether PyTorch has a kernel that is fast for short sequences: it has one for the CPU, without dropout."""
    return query.device.type == "cpu" and kept is None


def _batch(rows: Tensor, count: int) -> Tensor:
    """Rows of [heads, ...] as [sequences, heads, length, ...]."""
    return rows.view(count, -1, *rows.shape[1:]).transpose(1, 2)


# As products. Sums are made in single precision at the least, and what can be done for all sequences at once is; the
# weights of pairs, of which there are several times so many, for as many sequences as the caches of the cores hold.

PAIRS_OF_A_THREAD = 2**18
"""How many weights are made at once for each thread: 1 MiB of them."""


def pairs_at_once() -> int:
    """How many weights are made at once, unless a single sequence has more."""
    return PAIRS_OF_A_THREAD * torch.get_num_threads()


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, pairs: _Pairs, keep: float, scale: float | None
) -> tuple[Tensor, Tensor]:
    wide = _wide(query)
    scaled, keys, values = query.to(wide) * _scale(query, scale), key.to(wide), value.to(wide) * _inverse(keep)
    out = scaled.new_zeros((*query.shape[:2], value.shape[2]))
    for run in pairs.runs(wide, pairs_at_once() // query.shape[1]):
        weights = _dropped(_weights(scaled[run.queries], keys[run.keys], run), run)
        out[run.queries] = _as_rows(torch.bmm(weights, _flat(values[run.keys], run)), run)
    return out.to(query.dtype), out.new_zeros(query.shape[:2])


def _by_products_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, pairs: _Pairs, keep: float, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(query)
    scaled, keys, values = query.to(wide) * _scale(query, scale), key.to(wide), value.to(wide) * _inverse(keep)
    grads = torch.zeros_like(scaled), torch.zeros_like(keys), torch.zeros_like(values)
    incoming = grad.to(wide)
    for run in pairs.runs(wide, pairs_at_once() // query.shape[1]):
        q, k = run.queries, run.keys
        weights, slope = _weights(scaled[q], keys[k], run), _flat(incoming[q], run)
        change = _dropped(torch.bmm(slope, _flat(values[k], run).mT), run)
        change = aten._softmax_backward_data(change, weights, -1, wide)
        grads[0][q] = _as_rows(torch.bmm(change, _flat(keys[k], run)), run)
        grads[1][k] = _as_rows(torch.bmm(change.mT, _flat(scaled[q], run)), run)
        grads[2][k] = _as_rows(torch.bmm(_dropped(weights, run).mT, slope), run)
    grads[0].mul_(_scale(query, scale))
    grads[2].mul_(_inverse(keep))
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


def _weights(query: Tensor, key: Tensor, run: _Run) -> Tensor:
    """How much each query looks at each key, [sequences * heads, queries, keys]."""
    scores = torch.bmm(_flat(query, run), _flat(key, run).mT)
    if run.is_causal:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu_(1), -torch.inf)
    elif run.mask is not None:
        scores.view(run.sequences, -1, *scores.shape[1:]).add_(run.mask)
    return scores.softmax(-1)


def _dropped(weights: Tensor, run: _Run) -> Tensor:
    if run.dropped is not None:
        weights.view(run.sequences, -1, *weights.shape[1:]).masked_fill_(run.dropped, 0.0)
    return weights


def _flat(rows: Tensor, run: _Run) -> Tensor:
    """[sequences * heads, length, width]"""
    return _batch(rows, run.sequences).flatten(0, 1)


def _as_rows(flat: Tensor, run: _Run) -> Tensor:
    """The way back from `_flat`."""
    return flat.view(run.sequences, -1, *flat.shape[1:]).transpose(1, 2).flatten(0, 1)


def _wide(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _inverse(keep: float) -> float:
    """What a dropout multiplies by."""
    return 1 / keep if keep else 0.0


# Parts of masks


def _part(pairs: Tensor, numbers: Sequence[int], query_rows: Tensor, key_rows: Tensor) -> Tensor:
    """What [batch, heads, queries, keys] has for sequences of the same places; each but the last size may be 1."""
    part = pairs[numbers[0] : numbers[-1] + 1] if pairs.shape[0] > 1 else pairs
    if part.shape[2] > 1:
        part = _chosen(part, 2, query_rows)
    return _chosen(part, 3, key_rows)


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
