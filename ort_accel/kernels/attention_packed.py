"""Attention over rows, sequence by sequence: with PyTorch's fused kernel, or as products where that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ort_accel.kernels import attention_varlen_cuda
from ort_accel.kernels.attention_dense import PYTORCH, Failed, How, Kernels
from ort_accel.kernels.attention_precision import added
from ort_accel.memory.heap_tensors import packed

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
    """Sequences that follow each other and are alike."""

    alike: Sequence[_Sequence]
    known: _Pairs

    @property
    def sequences(self) -> int:
        return len(self.alike)

    @property
    def is_causal(self) -> bool:
        return self.alike[0].kind == CAUSAL

    @property
    def pairs(self) -> int:
        """Of a head."""
        return self.sequences * self.alike[0].pairs

    def how(self, scale: float | None, keep: float) -> How:
        """How they attend."""
        return How(self.mask(), self.is_causal, scale, self.kept(), keep)

    def mask(self) -> Tensor | None:
        """Which keys a query looks at, or what is added to the scores."""
        mask = self.known.mask if self.alike[0].kind == MASKED else None
        return None if mask is None else self._part(mask)

    def kept(self) -> Tensor | None:
        """What the weights are multiplied by: 1 where one is kept, 0 where it is dropped."""
        kept = self.known.kept
        return None if kept is None else self._part(kept).view(torch.uint8)

    def _part(self, pairs: Tensor) -> Tensor:
        """What [batch, heads, queries, keys] has for these sequences."""
        first, last = self.alike[0], self.alike[-1]
        part = pairs[first.number : last.number + 1] if pairs.shape[0] > 1 else pairs
        return first.keys.of(first.queries.of(part, 2), 3)


@dataclass(frozen=True)
class _Pairs:
    """Where queries and keys attend to each other."""

    spans: Tensor
    query_rows: Tensor
    key_rows: Tensor
    mask: Tensor | None
    kept: Tensor | None

    @property
    def told(self) -> _Told:
        """What the spans say."""
        return _told(self.spans, self.query_rows, self.key_rows)

    def runs(self, most: int | None = None) -> list[_Run]:
        """All sequences that have queries and keys. A batch without padding is one run, or several where a run is to
        have so many pairs at most."""
        key = most, *(None if pairs is None else pairs.shape[2:] for pairs in (self.mask, self.kept))
        groups = self.told.groups
        if key not in groups:
            groups[key] = list(self._groups(most))
        return [_Run(alike, self) for alike in groups[key]]

    def _groups(self, most: int | None) -> Iterator[Sequence[_Sequence]]:
        for _, group in groupby(self.told.sequences, key=self._form):
            alike = list(group)
            if pairs := alike[0].pairs:
                size = len(alike) if most is None else max(1, most // pairs)
                yield from (alike[start : start + size] for start in range(0, len(alike), size))

    def _form(self, sequence: _Sequence) -> Any:
        """What alike sequences have in common: their places, if these follow each other. Others are alone."""
        sides = sequence.queries, sequence.keys
        if not sequence.pairs or any(side.places is not None for side in sides):
            return sequence.number
        known = [pairs for pairs in (self.mask, self.kept) if pairs is not None]
        starts = [side.first % pairs.shape[dim] for pairs in known for dim, side in enumerate(sides, 2)]
        return sequence.kind, sequence.queries.length, sequence.keys.length, starts


class _Told(NamedTuple):
    """What spans say, with the rows that they were given with. None of the three tensors is ever written to."""

    query_rows: Tensor
    key_rows: Tensor
    sequences: Sequence[_Sequence]
    groups: dict[Any, Sequence[Sequence[_Sequence]]]
    """The sequences that are alike, by what masks there are."""
    all_ask: bool
    """Whether each row of queries has keys to look at, so that something is written for it."""
    all_answer: bool
    """Whether each row of keys is looked at."""
    lengths: attention_varlen_cuda.Lengths | None
    """What a CUDA device runs all sequences by, in one launch; None where that cannot be."""


_KNOWN: MutableMapping[Tensor, _Told] = WeakIdKeyDictionary()
"""Spans, while they live: all layers have the same, and reading them takes as long as a kernel."""


def _told(spans: Tensor, query_rows: Tensor, key_rows: Tensor) -> _Told:
    known = _KNOWN.get(spans)
    if known is not None and known.query_rows is query_rows and known.key_rows is key_rows:
        return known
    queries, keys = query_rows.tolist(), key_rows.tolist()
    found = []
    for number, (first_query, end_query, first_key, end_key, kind) in enumerate(spans.tolist()):
        asking = _stretch(query_rows, queries, first_query, end_query)
        found.append(_Sequence(number, asking, _stretch(key_rows, keys, first_key, end_key), kind))
    attending = [sequence for sequence in found if sequence.pairs]
    asked, answered = (sum(getattr(one, side).length for one in attending) for side in ("queries", "keys"))
    all_ask, all_answer = asked == len(queries), answered == len(keys)
    lengths = _lengths(found, spans.device) if all_ask and all_answer else None
    told = _Told(query_rows, key_rows, found, {}, all_ask, all_answer, lengths)
    _KNOWN[spans] = told
    return told


def _lengths(sequences: Sequence[_Sequence], device: torch.device) -> attention_varlen_cuda.Lengths | None:
    if not _has_varlen(device) or any(sequence.kind == MASKED for sequence in sequences):
        return None
    queries = [(one.queries.begin, one.queries.end) for one in sequences]
    keys = [(one.keys.begin, one.keys.end) for one in sequences]
    kinds = {one.kind for one in sequences if one.pairs > 1}  # one query and one key are causal and full
    return None if len(kinds) > 1 else attention_varlen_cuda.lengths_of(queries, keys, CAUSAL in kinds, device)


def _has_varlen(device: torch.device) -> bool:
    """True where PyTorch has variable-length kernels."""
    return device.type == "cuda"


def _varlen(query: Tensor, value: Tensor, pairs: _Pairs) -> attention_varlen_cuda.Lengths | None:
    """How one launch runs all sequences; None where it cannot."""
    if not _has_varlen(query.device) or pairs.kept is not None or not attention_varlen_cuda.runs(query, value):
        return None
    return pairs.told.lengths


def _stretch(rows: Tensor, places: Sequence[int], begin: int, end: int) -> _Stretch:
    if begin == end:
        return _Stretch(begin, end, 0, None)
    follow = places[end - 1] - places[begin] == end - 1 - begin
    return _Stretch(begin, end, places[begin], None if follow else rows[begin:end])


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
    kernels: Kernels = PYTORCH,
) -> tuple[Tensor, Tensor]:
    """The result, and what only the fused kernel keeps for its gradient: the logarithm of each row's sum."""
    pairs = _Pairs(spans, query_rows, key_rows, mask, kept)
    given = query, key, value, pairs, keep, scale
    if lengths := _varlen(query, value, pairs):
        return attention_varlen_cuda.forward(query, key, value, lengths, scale)
    if _is_fused(query, kept) or _drops(kernels, query, pairs):
        with suppress(Failed):
            return _by_kernels(kernels, *given)
    return _by_products(*given)


def _by_kernels(
    kernels: Kernels, query: Tensor, key: Tensor, value: Tensor, pairs: _Pairs, keep: float, scale: float | None
) -> tuple[Tensor, Tensor]:
    runs = pairs.runs()
    given = zip(*_by_queries(runs, query), *_by_keys(runs, key, value), strict=True)
    if _is_all(runs, query):
        out, logsumexp = map(_rows, kernels.forward(next(given), runs[0].how(scale, keep)))
        return out.to(query.dtype), logsumexp.to(_wide(query))
    blank = _blank(query, pairs.told.all_ask)
    out, logsumexp = blank((*query.shape[:2], value.shape[2])), blank(query.shape[:2], dtype=_wide(query))
    whole = zip(*_by_queries(runs, out, logsumexp), strict=True)
    for run, operands, places in zip(runs, given, whole, strict=True):
        _write(places, kernels.forward(operands, run.how(scale, keep)))
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
    kernels: Kernels = PYTORCH,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    pairs = _Pairs(spans, query_rows, key_rows, mask, kept)
    given = query, key, value, pairs, keep, scale
    if lengths := _varlen(query, value, pairs):
        return attention_varlen_cuda.backward(grad, query, key, value, (out, logsumexp), lengths, scale)
    if _is_fused(query, kept) or _drops(kernels, query, pairs):
        with suppress(Failed):
            return _by_kernels_backward(kernels, (grad, out, logsumexp), *given)
    return _by_products_backward(grad, *given)


def _by_kernels_backward(
    kernels: Kernels,
    results: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: _Pairs,
    keep: float,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out, logsumexp = results
    runs = pairs.runs()
    slopes, queries, outs, sums = _by_queries(runs, grad, query, out, logsumexp)
    given = zip(slopes, queries, *_by_keys(runs, key, value), outs, sums, strict=True)
    if _is_all(runs, query, key):
        whole_run = map(_rows, kernels.backward(next(given), runs[0].how(scale, keep)))
        of_query, of_key, of_value = (
            one.to(like.dtype) for one, like in zip(whole_run, (query, key, value), strict=True)
        )
        return of_query, of_key, of_value
    grads = _grads(pairs, query, key, value)
    whole = zip(*_by_queries(runs, grads[0]), *_by_keys(runs, *grads[1:]), strict=True)
    for run, operands, places in zip(runs, given, whole, strict=True):
        _write(places, kernels.backward(operands, run.how(scale, keep)))
    return grads


def _blank(like: Tensor, is_written: bool) -> Callable[..., Tensor]:
    """What makes a tensor of that type: plain memory where each row of it will be written, otherwise zeros."""
    return like.new_empty if is_written else like.new_zeros


def _grads(pairs: _Pairs, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of these."""
    of_queries, of_keys = _blank(query, pairs.told.all_ask), _blank(key, pairs.told.all_answer)
    return of_queries(query.shape), of_keys(key.shape), _blank(value, pairs.told.all_answer)(value.shape)


def _is_fused(query: Tensor, kept: Tensor | None) -> bool:
    """Whether PyTorch has a kernel that is fast for short sequences: it has one for the CPU, without dropout."""
    return query.device.type == "cpu" and kept is None


def _drops(kernels: Kernels, query: Tensor, pairs: _Pairs) -> bool:
    """Whether these kernels run the dropout of all sequences, none of which has a mask."""
    if pairs.kept is None or kernels is PYTORCH:
        return False
    runs = pairs.runs()
    is_plain = bool(runs) and all(run.alike[0].kind != MASKED for run in runs)
    return is_plain and kernels.drops(query, query.shape[1] * min(run.pairs for run in runs))


def _is_all(runs: Sequence[_Run], *tensors: Tensor) -> bool:
    """Whether a single run has every row of queries, and of keys where these are given, too."""
    if len(runs) != 1:
        return False
    first, last = runs[0].alike[0], runs[0].alike[-1]
    edges = (first.queries.begin, last.queries.end), (first.keys.begin, last.keys.end)
    return all(edge == (0, tensor.shape[0]) for edge, tensor in zip(edges, tensors, strict=False))


def _rows(batch: Tensor) -> Tensor:
    """[sequences, heads, length, ...] as [rows, heads, ...]: how PyTorch's kernels lay out their results in memory."""
    return packed(batch.transpose(1, 2).flatten(0, 1))


def _write(places: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    for place, result in zip(places, results, strict=True):
        place.copy_(result)


def _by_queries(runs: Sequence[_Run], *tensors: Tensor) -> list[list[Tensor]]:
    """What each run has of tensors with a row a query, as [sequences, heads, length, ...]."""
    return _divided(runs, [(run.alike[0].queries.begin, run.alike[-1].queries.end) for run in runs], tensors)


def _by_keys(runs: Sequence[_Run], *tensors: Tensor) -> list[list[Tensor]]:
    """The same with a row a key."""
    return _divided(runs, [(run.alike[0].keys.begin, run.alike[-1].keys.end) for run in runs], tensors)


def _divided(runs: Sequence[_Run], edges: Sequence[tuple[int, int]], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The views of sequences that run alone are made at once: one by one they take as long as the kernel."""
    if any(run.sequences > 1 for run in runs):
        return [
            [_batch(tensor[slice(*edge)], run) for edge, run in zip(edges, runs, strict=True)] for tensor in tensors
        ]
    sizes, places, end = [], [], 0
    for begin, next_end in edges:
        if begin > end:  # rows of sequences that attend to nothing
            sizes.append(begin - end)
        places.append(len(sizes))
        sizes.append(next_end - begin)
        end = next_end
    divided = []
    for tensor in tensors:
        heads = tensor.transpose(0, 1).unsqueeze(0)
        parts = torch.split_with_sizes(heads, [*sizes, tensor.shape[0] - end], 2)
        divided.append([parts[place] for place in places])
    return divided


def _batch(rows: Tensor, run: _Run) -> Tensor:
    return rows.view(run.sequences, -1, *rows.shape[1:]).transpose(1, 2)


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
    out = _blank(scaled, pairs.told.all_ask)((*query.shape[:2], value.shape[2]))
    runs = pairs.runs(pairs_at_once() // query.shape[1])
    given = zip(*_by_queries(runs, scaled, out), *_by_keys(runs, keys, values), strict=True)
    for run, (each_query, place, *others) in zip(runs, given, strict=True):
        q, k, v = map(_flat, (each_query, *others))
        _put(torch.bmm(_dropped(_weights(q, k, run), run, run.kept()), v), place)
    return out.to(query.dtype), out.new_zeros(query.shape[:2])


def _by_products_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, pairs: _Pairs, keep: float, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(query)
    scaled, keys, values = query.to(wide) * _scale(query, scale), key.to(wide), value.to(wide) * _inverse(keep)
    grads = _grads(pairs, scaled, keys, values)
    incoming = grad.to(wide)
    runs = pairs.runs(pairs_at_once() // query.shape[1])
    given = zip(*_by_queries(runs, scaled, incoming), *_by_keys(runs, keys, values), strict=True)
    whole = zip(*_by_queries(runs, grads[0]), *_by_keys(runs, *grads[1:]), strict=True)
    for run, operands, places in zip(runs, given, whole, strict=True):
        q, slope, k, v = map(_flat, operands)
        weights, kept = _weights(q, k, run), run.kept()
        change = _dropped(torch.bmm(slope, v.mT), run, kept)
        change = aten._softmax_backward_data(change, weights, -1, wide)
        _put(torch.bmm(change, k), places[0])
        _put(torch.bmm(change.mT, q), places[1])
        _put(torch.bmm(_dropped(weights, run, kept).mT, slope), places[2])
    grads[0].mul_(_scale(query, scale))
    grads[2].mul_(_inverse(keep))
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


def _weights(query: Tensor, key: Tensor, run: _Run) -> Tensor:
    """How much each query looks at each key, [sequences * heads, queries, keys]."""
    scores = torch.bmm(query, key.mT)
    if run.is_causal:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu_(1), -torch.inf)
    elif (mask := run.mask()) is not None:
        scores.view(run.sequences, -1, *scores.shape[1:]).add_(added(mask, scores.dtype))
    return scores.softmax(-1)


def _dropped(weights: Tensor, run: _Run, kept: Tensor | None) -> Tensor:
    if kept is not None:  # a product with integers of 8 bits takes a fifth of the time of filling
        weights.view(run.sequences, -1, *weights.shape[1:]).mul_(kept)
    return weights


def _flat(batch: Tensor) -> Tensor:
    """[sequences * heads, length, width]. For a single sequence that is a cheaper view."""
    return batch.squeeze(0) if batch.shape[0] == 1 else batch.flatten(0, 1)


def _put(flat: Tensor, place: Tensor) -> None:
    """Write [sequences * heads, length, width] to the rows of a whole."""
    place.copy_(flat.view(place.shape))


def _wide(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _inverse(keep: float) -> float:
    """What a dropout multiplies by."""
    return 1 / keep if keep else 0.0
