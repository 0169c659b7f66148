"""What a data loader tells about the sizes of its batches before it gives the first one.

Nothing is taken from the loader, and no sample is made twice: only lists and tables of finished samples are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, TypeGuard

from torch.utils.data import DataLoader

from ort_accel.capture.dynamic_shapes import Foreseen

NAMES = ("input_values", "labels")
"""The parts of a sample that have a length of their own, besides tokens (`input_ids`, TRL's `chosen_ids`)."""

MOST_BATCHES, MOST_SAMPLES = 32, 1024
"""How much is looked at."""


def foreseen_in(loader: Any, steps: int | None = None) -> Foreseen:
    """What is known of the batches of a loader; `steps` is how many of them will be taken, where that is known."""
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    size = getattr(batches, "batch_size", None)
    if not size:
        return Foreseen()
    try:
        count = len(loader.dataset)
    except TypeError:  # samples come one by one
        return Foreseen()
    reaches_the_last = steps is None or steps >= len(loader)
    keeps_the_last = not getattr(batches, "drop_last", False) and not _is_filled_up(batches)
    return Foreseen(
        lengths=_lengths_differ(loader.dataset, loader.collate_fn, size),
        batch=bool(count % size) and count > size and keeps_the_last and reaches_the_last,
    )


def _is_filled_up(batches: Any) -> bool:
    """Whether accelerate fills the last batches of several processes with samples from the beginning."""
    return getattr(batches, "num_processes", 1) > 1 and bool(getattr(batches, "even_batches", False))


def _lengths_differ(dataset: Any, collate: Any, size: int) -> bool:
    """Whether batches in the order of the dataset, each padded to its longest sample, would have different lengths."""
    collate = getattr(collate, "data_collator", collate)  # a Trainer puts one around it that removes columns
    if getattr(collate, "padding", True) in (False, "max_length"):
        return False
    multiple = getattr(collate, "pad_to_multiple_of", None) or 1
    columns = _columns(dataset, min(MOST_BATCHES * size, MOST_SAMPLES))
    for lengths in columns:
        batches = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        if len({-(-max(batch) // multiple) for batch in batches}) > 1:
            return True
    return False


def _columns(dataset: Any, count: int) -> list[list[int]]:
    """The lengths of the first samples, for each of the names that they have."""
    if isinstance(dataset, list | tuple):
        rows = [row for row in dataset[:count] if isinstance(row, Mapping)]
        found = [[row.get(name) for row in rows] for name in _with_lengths(rows[0] if rows else ())]
    elif hasattr(dataset, "column_names") and dataset.format["type"] != "custom":  # of the package `datasets`
        names = _with_lengths(dataset.column_names)  # other columns may hold pictures
        found = list(map(list, dataset.select_columns(names)[:count].values())) if names else []
    else:
        return []
    return [[len(value) for value in column if _has_length(value)] for column in found if all(map(_has_length, column))]


def _with_lengths(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in NAMES or name.endswith("_ids")]


def _has_length(value: Any) -> TypeGuard[Sized]:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1
