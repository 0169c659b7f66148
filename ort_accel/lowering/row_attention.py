"""Attention over rows, sequence by sequence: with PyTorch's fused kernel, or as products where that cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ort_accel.lowering.attention_precision import BACKWARD, FORWARD, is_faster_wide

aten = torch.ops.aten

FULL, CAUSAL, MASKED = range(3)
"""How a sequence attends, the last number of its span: each query to all keys, to those up to it, or as a mask says."""


class _Stretch(NamedTuple):
    """The rows of one sequence."""

    begin: int
    end: int
    """From which row up to which they are, among those of all sequences."""
    first: int
    """The place of the first."""
    places: Tensor | None
    """Their places, unless these follow each other, as they do where no padding stands between tokens."""

    @property
    def length(self) -> int:
        return self.end - self.begin

    def of(self, pairs: Tensor, dim: int) -> Tensor:
        """What [batch, heads, queries, keys] has for these rows on one side; a size of 1 is for all of them."""
        size = pairs.shape[dim]
        if size == 1:
            return pairs
        if self.places is None:
            return pairs.narrow(dim, self.first % size, self.length)
        return pairs.index_select(dim, self.places % size)


class _Sequence(NamedTuple):
    """Queries of one sequence, and the keys that they look at."""

    number: int
    queries: _Stretch
    keys: _Stretch
    kind: int

    @property
    def pairs(self) -> int:
        return self.queries.length * self.keys.length


class _Run(NamedTuple):
    """Sequences that follow each other and are alike: their rows, and what is known of their pairs."""

    sequences: int
    queries: slice
    keys: slice
    is_causal: bool
    mask: Tensor | None
    """What is added to the scores."""
    kept: Tensor | None
    """What the weights are multiplied by: 1 where one is kept, 0 where it is dropped."""


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
        for _, group in groupby(self._sequences(), key=self._form):
            alike = list(group)
            pairs = alike[0].pairs
            if not pairs:
                continue
            size = len(alike) if most is None else max(1, most // pairs)
            for start in range(0, len(alike), size):
                yield self._run(alike[start : start + size], dtype)

    def _sequences(self) -> Iterator[_Sequence]:
        queries, keys = self.query_rows.tolist(), self.key_rows.tolist()
        for number, (first_query, end_query, first_key, end_key, kind) in enumerate(self.spans.tolist()):
            asking = _stretch(self.query_rows, queries, first_query, end_query)
            yield _Sequence(number, asking, _stretch(self.key_rows, keys, first_key, end_key), kind)

    def _form(self, sequence: _Sequence) -> Any:
        """What alike sequences have in common: their places, if these follow each other. Others are alone."""
        sides = sequence.queries, sequence.keys
        if not sequence.pairs or any(side.places is not None for side in sides):
            return sequence.number
        known = [pairs for pairs in (self.mask, self.kept) if pairs is not None]
        starts = [side.first % pairs.shape[dim] for pairs in known for dim, side in enumerate(sides, 2)]
        return sequence.kind, sequence.queries.length, sequence.keys.length, starts

    def _run(self, alike: Sequence[_Sequence], dtype: torch.dtype) -> _Run:
        first, last = alike[0], alike[-1]
        mask = self.mask if first.kind == MASKED else None
        return _Run(
            len(alike),
            slice(first.queries.begin, last.queries.end),
            slice(first.keys.begin, last.keys.end),
            first.kind == CAUSAL,
            None if mask is None else _added(_part(mask, alike), dtype),
            None if self.kept is None else _part(self.kept, alike).view(torch.uint8),
        )


def _stretch(rows: Tensor, places: Sequence[int], begin: int, end: int) -> _Stretch:
    if begin == end:
        return _Stretch(begin, end, 0, None)
    follow = places[end - 1] - places[begin] == end - 1 - begin
    return _Stretch(begin, end, places[begin], None if follow else rows[begin:end])


def _part(pairs: Tensor, alike: Sequence[_Sequence]) -> Tensor:
    """What [batch, heads, queries, keys] has for alike sequences."""
    first, last = alike[0], alike[-1]
    part = pairs[first.number : last.number + 1] if pairs.shape[0] > 1 else pairs
    return first.keys.of(first.queries.of(part, 2), 3)


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
    for run in pairs.runs(query.dtype):
        q, k = run.queries, run.keys
        given, how = _for_kernel(FORWARD, run, (query[q], key[k], value[k]))
        part, sums = FORWARD(*given, **how, scale=scale)
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
    for run in pairs.runs(query.dtype):
        q, k = run.queries, run.keys
        given, how = _for_kernel(BACKWARD, run, (grad[q], query[q], key[k], value[k], out[q]))
        parts = BACKWARD(*given, _batch(logsumexp[q], run.sequences), 0.0, **how, scale=scale)
        for whole, where, part in zip(grads, (q, k, k), parts, strict=True):
            whole[where] = part.transpose(1, 2).flatten(0, 1)
    return grads


def _is_fused(query: Tensor, kept: Tensor | None) -> bool:
    """Whether PyTorch has a kernel that is fast for short sequences: it has one for the CPU, without dropout."""
    return query.device.type == "cpu" and kept is None


def _for_kernel(kernel: Any, run: _Run, rows: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """What the kernel is called with: rows as sequences, in the type in which it is faster, and how they attend."""
    given, mask = [_batch(item, run.sequences) for item in rows], run.mask
    dtype, tokens = given[0].dtype, max(item.shape[2] for item in given)
    if is_faster_wide(kernel, dtype, tokens):
        given = [item.to(torch.float32) for item in given]
        mask = None if mask is None else mask.to(torch.float32)
    return given, {"is_causal": run.is_causal, "attn_mask": mask}


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
        q, k, v = _flat(scaled[run.queries], run), _flat(keys[run.keys], run), _flat(values[run.keys], run)
        _put(torch.bmm(_dropped(_weights(q, k, run), run), v), out[run.queries], run)
    return out.to(query.dtype), out.new_zeros(query.shape[:2])


def _by_products_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, pairs: _Pairs, keep: float, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(query)
    scaled, keys, values = query.to(wide) * _scale(query, scale), key.to(wide), value.to(wide) * _inverse(keep)
    grads = torch.zeros_like(scaled), torch.zeros_like(keys), torch.zeros_like(values)
    incoming = grad.to(wide)
    for run in pairs.runs(wide, pairs_at_once() // query.shape[1]):
        q, slope = _flat(scaled[run.queries], run), _flat(incoming[run.queries], run)
        k, v = _flat(keys[run.keys], run), _flat(values[run.keys], run)
        weights = _weights(q, k, run)
        change = _dropped(torch.bmm(slope, v.mT), run)
        change = aten._softmax_backward_data(change, weights, -1, wide)
        _put(torch.bmm(change, k), grads[0][run.queries], run)
        _put(torch.bmm(change.mT, q), grads[1][run.keys], run)
        _put(torch.bmm(_dropped(weights, run).mT, slope), grads[2][run.keys], run)
    grads[0].mul_(_scale(query, scale))
    grads[2].mul_(_inverse(keep))
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


def _weights(query: Tensor, key: Tensor, run: _Run) -> Tensor:
    """How much each query looks at each key, [sequences * heads, queries, keys]."""
    scores = torch.bmm(query, key.mT)
    if run.is_causal:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu_(1), -torch.inf)
    elif run.mask is not None:
        scores.view(run.sequences, -1, *scores.shape[1:]).add_(run.mask)
    return scores.softmax(-1)


def _dropped(weights: Tensor, run: _Run) -> Tensor:
    if run.kept is not None:  # a product with integers of 8 bits takes a fifth of the time that filling takes
        weights.view(run.sequences, -1, *weights.shape[1:]).mul_(run.kept)
    return weights


def _flat(rows: Tensor, run: _Run) -> Tensor:
    """[sequences * heads, length, width]. A single sequence needs one view instead of three."""
    return rows.transpose(0, 1) if run.sequences == 1 else _batch(rows, run.sequences).flatten(0, 1)


def _put(flat: Tensor, rows: Tensor, run: _Run) -> None:
    """The way back from `_flat`, into the rows of a whole."""
    _batch(rows, run.sequences).copy_(flat.view(run.sequences, -1, *flat.shape[1:]))


def _wide(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _inverse(keep: float) -> float:
    """What a dropout multiplies by."""
    return 1 / keep if keep else 0.0


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores."""
    if mask.dtype == torch.bool:
        return mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.to(dtype)
