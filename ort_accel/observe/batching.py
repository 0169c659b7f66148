"""Estimates the FLOPs of other batching schemes from the lengths of the rows that were seen."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ort_accel.reporting.batches import BatchingScheme

MEGABATCH = 50
"""The number of batches whose rows transformers' `group_by_length` sorts among each other."""

Lengths = tuple[int, ...]
"""The tokens of a row: one number, or one each for an encoder and a decoder."""


@dataclass(frozen=True)
class Work:
    """Estimated FLOPs of a row's forward and backward, by the term of its lengths that they grow with."""

    token: tuple[float, ...]
    """FLOPs of each token, for each of the row's lengths."""
    pair: tuple[float, ...]
    """FLOPs of each pair of tokens in self-attention, for each of the row's lengths."""
    cross: float = 0.0
    """FLOPs of each pair of tokens in cross-attention."""
    label: float = 0.0
    """FLOPs of each token whose logits are computed."""

    def of(self, lengths: Lengths) -> float:
        """Returns the FLOPs of a row, without its logits."""
        tokens = sum(each * length for each, length in zip(self.token, lengths, strict=True))
        pairs = sum(each * length * length for each, length in zip(self.pair, lengths, strict=True))
        return tokens + pairs + (self.cross * lengths[0] * lengths[-1] if len(lengths) > 1 else 0.0)


@dataclass(frozen=True)
class SeenBatch:
    """The lengths of one batch."""

    widths: Lengths
    """The lengths that its rows are padded to."""
    rows: tuple[Lengths, ...]
    """The valid tokens of each row."""
    labels: int
    """The number of labels that are not ignored."""


def schemes(batches: Sequence[SeenBatch], work: Work) -> list[BatchingScheme]:
    """Returns the FLOPs of each batching scheme, dense first. All schemes compute the same rows."""
    rows = [row for batch in batches for row in batch.rows]
    narrow = (_batch_of(batch.rows) for batch in batches)
    found = [
        BatchingScheme("dense, in the batches as they came", _padded(batches, work)),
        BatchingScheme("each batch padded to its longest row", _padded(narrow, work)),
        BatchingScheme("rows grouped by length (group_by_length)", _padded(_grouped(batches), work)),
    ]
    if rows and len(rows[0]) == 1:
        width = max(batch.widths[0] for batch in batches)
        packed = _bins([row[0] for row in rows], width)
        found.append(BatchingScheme(f"rows packed into {width} tokens (packing)", packed * _dense_row((width,), work)))
    labels = work.label * sum(batch.labels for batch in batches)
    found.append(BatchingScheme(NEEDED, sum(map(work.of, rows)) + labels))
    return found


NEEDED = "tokens and labels that count, alone (density)"
"""The name of the scheme that computes neither padding nor ignored labels."""


def _padded(batches: Iterable[SeenBatch], work: Work) -> float:
    return sum(len(batch.rows) * _dense_row(batch.widths, work) for batch in batches)


def _dense_row(widths: Lengths, work: Work) -> float:
    return work.of(widths) + work.label * widths[-1]


def _batch_of(rows: Sequence[Lengths]) -> SeenBatch:
    return SeenBatch(tuple(map(max, zip(*rows, strict=True))), tuple(rows), 0)


def _grouped(batches: Sequence[SeenBatch]) -> Iterator[SeenBatch]:
    """Yields batches of the same sizes, with rows of about the same length."""
    for start in range(0, len(batches), MEGABATCH):
        together = batches[start : start + MEGABATCH]
        rows = sorted((row for batch in together for row in batch.rows), reverse=True)
        taken = 0
        for batch in together:
            yield _batch_of(rows[taken : taken + len(batch.rows)])
            taken += len(batch.rows)


def _bins(lengths: Sequence[int], width: int) -> int:
    """Returns the number of rows of a width that best-fit packing fills with these lengths."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        best = bisect_left(room, length)
        left = room.pop(best) if best < len(room) else width
        insort(room, left - length)
    return len(room)


def waiting(batches: Sequence[SeenBatch], processes: int, seed: int = 0) -> tuple[float, float] | None:
    """Returns the share of time that processes wait for the one with the most tokens: unbalanced, and balanced.

    None if there are too few rows.
    """
    size = len(batches[0].rows) if batches else 0
    rows = [sum(row) for batch in batches for row in batch.rows]
    steps = len(rows) // (processes * size) if size else 0
    if steps < 2:
        return None
    rows = rows[: steps * processes * size]
    unbalanced = [rows[start : start + size] for start in range(0, len(rows), size)]
    shuffler = random.Random(seed)
    rounds = [sorted(rows)[start : start + processes] for start in range(0, len(rows), processes)]
    for one in rounds:
        shuffler.shuffle(one)
    shuffler.shuffle(rounds)
    balanced = [
        [one[process] for one in rounds[start : start + size]]
        for start in range(0, len(rounds), size)
        for process in range(processes)
    ]
    return _share_of_waiting(unbalanced, processes), _share_of_waiting(balanced, processes)


def _share_of_waiting(batches: Sequence[Sequence[int]], processes: int) -> float:
    loads = [sum(batch) for batch in batches]
    slowest = sum(max(loads[start : start + processes]) for start in range(0, len(loads), processes))
    return 1 - sum(loads) / (slowest * processes) if slowest else 0.0
