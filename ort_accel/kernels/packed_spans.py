"""The sequences of packed attention, parsed from the operator's spans and grouped into batches of equal form.

Each row of `spans` is a sequence: where its queries begin and end, where its keys do, and how it is masked.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ort_accel.kernels import attention_varlen_cuda
from ort_accel.kernels.attention_dense import AttentionOptions

FULL, CAUSAL, MASKED = range(3)
"""The masking of a sequence: each query attends to all keys, to those up to its own, or as a mask says."""


class _RowRange(NamedTuple):
    """The rows of one sequence, on the side of the queries or of the keys."""

    begin: int
    end: int
    first: int
    """The position of the first row in the padded batch."""
    positions: Tensor | None
    """The positions of all rows; None where they are consecutive, without padding between tokens."""

    @property
    def length(self) -> int:
        return self.end - self.begin

    def select(self, pairs: Tensor, dim: int) -> Tensor:
        """Return the part of [batch, heads, queries, keys] for these rows; a size of 1 holds for all rows."""
        size = pairs.shape[dim]
        if size == 1:
            return pairs
        if self.positions is None:
            return pairs.narrow(dim, self.first % size, self.length)
        return pairs.index_select(dim, self.positions % size)


class PackedSequence(NamedTuple):
    """The queries of one sequence, and the keys that they attend to."""

    number: int
    queries: _RowRange
    keys: _RowRange
    masking: int

    @property
    def pairs(self) -> int:
        return self.queries.length * self.keys.length

    def sample(self, pairs: Tensor) -> int:
        """Return which sample of [batch, heads, queries, keys] has the sequence; several may be packed in one."""
        if pairs.shape[0] == 1:
            return 0
        sizes = ((side.first, pairs.shape[dim]) for dim, side in ((2, self.queries), (3, self.keys)))
        return next((first // size for first, size in sizes if size > 1), self.number)


class Batch(NamedTuple):
    """Consecutive sequences of equal lengths and masking, which one kernel call runs."""

    members: Sequence[PackedSequence]
    pairs_given: Pairs

    @property
    def sequences(self) -> int:
        return len(self.members)

    @property
    def is_causal(self) -> bool:
        return self.members[0].masking == CAUSAL

    @property
    def is_masked(self) -> bool:
        return self.members[0].masking == MASKED

    @property
    def query_rows(self) -> tuple[int, int]:
        return self.members[0].queries.begin, self.members[-1].queries.end

    @property
    def key_rows(self) -> tuple[int, int]:
        return self.members[0].keys.begin, self.members[-1].keys.end

    def options(self, scale: float | None) -> AttentionOptions:
        """Return the options for a dense kernel."""
        return AttentionOptions(self.mask(), self.is_causal, scale)

    def mask(self) -> Tensor | None:
        """Return which keys a query attends to, or numbers to add to the scores."""
        mask = self.pairs_given.mask if self.is_masked else None
        return None if mask is None else self._part(mask)

    def kept(self) -> Tensor | None:
        """Return 1 where dropout keeps a weight, 0 where it drops it."""
        kept = self.pairs_given.kept
        return None if kept is None else self._part(kept).view(torch.uint8)

    def _part(self, pairs: Tensor) -> Tensor:
        """Return the part of [batch, heads, queries, keys] for these sequences."""
        first, last = self.members[0], self.members[-1]
        part = pairs[first.sample(pairs) : last.sample(pairs) + 1] if pairs.shape[0] > 1 else pairs
        return first.keys.select(first.queries.select(part, 2), 3)


@dataclass(frozen=True)
class Pairs:
    """The pairs of queries and keys that attend: the operator's spans, rows and masks."""

    spans: Tensor
    query_rows: Tensor
    key_rows: Tensor
    mask: Tensor | None
    kept: Tensor | None

    @property
    def parsed(self) -> ParsedSpans:
        return _parse(self.spans, self.query_rows, self.key_rows)

    def batches(self, most_pairs: int | None = None) -> list[Batch]:
        """Return all sequences that have queries and keys, in batches of at most so many pairs a head."""
        key = most_pairs, *(None if pairs is None else pairs.shape[2:] for pairs in (self.mask, self.kept))
        groups = self.parsed.groups
        if key not in groups:
            groups[key] = list(self._groups(most_pairs))
        return [Batch(members, self) for members in groups[key]]

    def _groups(self, most_pairs: int | None) -> Iterator[Sequence[PackedSequence]]:
        for _, group in groupby(self.parsed.sequences, key=self._form):
            members = list(group)
            if pairs := members[0].pairs:
                size = len(members) if most_pairs is None else max(1, most_pairs // pairs)
                yield from (members[start : start + size] for start in range(0, len(members), size))

    def _form(self, sequence: PackedSequence) -> Hashable:
        """Return what the sequences of a batch have in common. A sequence with gaps is a batch of its own."""
        sides = sequence.queries, sequence.keys
        if not sequence.pairs or any(side.positions is not None for side in sides):
            return sequence.number
        mask = self.mask if sequence.masking == MASKED else None
        given = [pairs for pairs in (mask, self.kept) if pairs is not None]
        starts = [side.first % pairs.shape[dim] for pairs in given for dim, side in enumerate(sides, 2)]
        rows = [sequence.number - sequence.sample(pairs) for pairs in given if pairs.shape[0] > 1]  # neighbouring rows
        return sequence.masking, sequence.queries.length, sequence.keys.length, *starts, *rows


class ParsedSpans(NamedTuple):
    """Spans as Python numbers, with the rows that they were given with. None of the tensors is ever written to."""

    query_rows: Tensor
    key_rows: Tensor
    sequences: Sequence[PackedSequence]
    groups: dict[Hashable, Sequence[Sequence[PackedSequence]]]
    """The members of each batch, by the most pairs and by the sizes of the masks."""
    every_query_attends: bool
    """Each row of queries has keys, so that its result is written."""
    every_key_is_attended: bool
    lengths: attention_varlen_cuda.Lengths | None
    """The arguments of a variable-length kernel, which runs all sequences in one launch; None where it cannot."""


_PARSED: MutableMapping[Tensor, ParsedSpans] = WeakIdKeyDictionary()
"""Parsed spans, while the tensor lives: all layers share it, and reading it takes as long as a kernel."""


def _parse(spans: Tensor, query_rows: Tensor, key_rows: Tensor) -> ParsedSpans:
    parsed = _PARSED.get(spans)
    if parsed is not None and parsed.query_rows is query_rows and parsed.key_rows is key_rows:
        return parsed
    queries, keys = query_rows.tolist(), key_rows.tolist()
    sequences = []
    for number, (first_query, end_query, first_key, end_key, masking) in enumerate(spans.tolist()):
        query_range = _row_range(query_rows, queries, first_query, end_query)
        sequences.append(PackedSequence(number, query_range, _row_range(key_rows, keys, first_key, end_key), masking))
    attending = [sequence for sequence in sequences if sequence.pairs]
    every_query = sum(one.queries.length for one in attending) == len(queries)
    every_key = sum(one.keys.length for one in attending) == len(keys)
    lengths = _varlen_lengths(attending, spans.device) if every_query and every_key else None
    parsed = ParsedSpans(query_rows, key_rows, sequences, {}, every_query, every_key, lengths)
    _PARSED[spans] = parsed
    return parsed


def _row_range(rows: Tensor, positions: Sequence[int], begin: int, end: int) -> _RowRange:
    if begin == end:
        return _RowRange(begin, end, 0, None)
    is_consecutive = positions[end - 1] - positions[begin] == end - 1 - begin
    return _RowRange(begin, end, positions[begin], None if is_consecutive else rows[begin:end])


def _varlen_lengths(sequences: Sequence[PackedSequence], device: torch.device) -> attention_varlen_cuda.Lengths | None:
    if not has_varlen(device) or any(sequence.masking == MASKED for sequence in sequences):
        return None
    queries = [(one.queries.begin, one.queries.end) for one in sequences]
    keys = [(one.keys.begin, one.keys.end) for one in sequences]
    maskings = {one.masking for one in sequences if one.pairs > 1}  # one query and one key are causal and full
    return None if len(maskings) > 1 else attention_varlen_cuda.lengths_of(queries, keys, CAUSAL in maskings, device)


def has_varlen(device: torch.device) -> bool:
    """True where PyTorch has variable-length kernels."""
    return device.type == "cuda"
