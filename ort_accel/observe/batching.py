"""What other ways of making batches would compute, worked out from the lengths of the rows that were seen."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ort_accel.reporting import Way

MEGABATCH = 50
"""Batches whose rows transformers' `group_by_length` sorts among each other."""

Lengths = tuple[int, ...]
"""The tokens of a row: one number, or for an encoder and a decoder one each."""


@dataclass(frozen=True)
class Work:
    """Estimated FLOPs of a row's forward and backward, by what grows with its lengths."""

    token: tuple[float, ...]
    """Of each token, for each of the row's lengths."""
    pair: tuple[float, ...]
    """Of each two tokens that attend to each other, for each of the row's lengths."""
    crossing: float = 0.0
    """Of each token of the decoder with each of the encoder."""
    label: float = 0.0
    """Of each token whose logits are computed."""

    def of(self, lengths: Lengths) -> float:
        """Of a row, without its logits."""
        tokens = sum(each * length for each, length in zip(self.token, lengths, strict=True))
        pairs = sum(each * length * length for each, length in zip(self.pair, lengths, strict=True))
        return tokens + pairs + (self.crossing * lengths[0] * lengths[-1] if len(lengths) > 1 else 0.0)


@dataclass(frozen=True)
class SeenBatch:
    """The lengths that one batch had."""

    widths: Lengths
    """To what its rows are padded."""
    rows: tuple[Lengths, ...]
    """How many tokens of each row count."""
    labels: int
    """How many labels count."""


def ways(batches: Sequence[SeenBatch], work: Work) -> list[Way]:
    """Returns how much each way of making batches computes, the most wasteful first. All compute the same rows."""
    rows = [row for batch in batches for row in batch.rows]
    found = [
        Way("dense, in the batches as they came", _padded(batches, work)),
        Way("each batch padded to its longest row", _padded(map(_to_longest, batches), work)),
        Way("rows grouped by length (group_by_length)", _padded(_grouped(batches), work)),
    ]
    if rows and len(rows[0]) == 1:
        width = max(batch.widths[0] for batch in batches)
        packed = _bins([row[0] for row in rows], width)
        found.append(Way(f"rows packed into {width} tokens (packing)", packed * _dense_row((width,), work)))
    labels = work.label * sum(batch.labels for batch in batches)
    found.append(Way(NEEDED, sum(map(work.of, rows)) + labels))
    return found


NEEDED = "tokens and labels that count, alone (density)"
"""What is left when nothing that is padding or ignored is computed."""


def _padded(batches: Iterable[SeenBatch], work: Work) -> float:
    return sum(len(batch.rows) * _dense_row(batch.widths, work) for batch in batches)


def _dense_row(widths: Lengths, work: Work) -> float:
    return work.of(widths) + work.label * widths[-1]


def _to_longest(batch: SeenBatch) -> SeenBatch:
    return _batch_of(batch.rows)


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
    """Returns how many rows of a width hold all these: each goes where the least room is left that suffices."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = bisect_left(room, length)
        left = room.pop(place) if place < len(room) else width
        insort(room, left - length)
    return len(room)


def waiting(batches: Sequence[SeenBatch], processes: int, seed: int = 0) -> tuple[float, float] | None:
    """Returns the share of time that processes wait for the one with the most tokens: as batches came, and balanced.

    None where there are too few rows to tell.
    """
    size = len(batches[0].rows) if batches else 0
    rows = [sum(row) for batch in batches for row in batch.rows]
    steps = len(rows) // (processes * size) if size else 0
    if steps < 2:
        return None
    rows = rows[: steps * processes * size]
    came = [rows[start : start + size] for start in range(0, len(rows), size)]
    dice = random.Random(seed)
    rounds = [sorted(rows)[start : start + processes] for start in range(0, len(rows), processes)]
    for one in rounds:
        dice.shuffle(one)
    dice.shuffle(rounds)
    dealt = [
        [one[process] for one in rounds[start : start + size]]
        for start in range(0, len(rounds), size)
        for process in range(processes)
    ]
    return _share_of_waiting(came, processes), _share_of_waiting(dealt, processes)


def _share_of_waiting(batches: Sequence[Sequence[int]], processes: int) -> float:
    loads = [sum(batch) for batch in batches]
    slowest = sum(max(loads[start : start + processes]) for start in range(0, len(loads), processes))
    return 1 - sum(loads) / (slowest * processes) if slowest else 0.0
