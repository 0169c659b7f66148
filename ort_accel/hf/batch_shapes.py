"""Prediction of a data loader's batch shapes before its first batch.

No batch is taken from the loader, and no sample is computed twice: only lists and tables of finished samples are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, TypeGuard

from torch.utils.data import DataLoader

from ort_accel.capture.dynamic_shapes import ForeseenSizes
from ort_accel.data import PackingCollator

SEQUENCE_COLUMNS = ("input_values", "labels")
"""The columns of a sample that are sequences, besides tokens (`input_ids`, TRL's `chosen_ids`)."""

LISTED = (None, "torch", "numpy")
"""Formats of a table of `datasets` in which a column is a list of samples."""
MAX_BATCHES, MAX_SAMPLES = 32, 1024
"""The most batches and samples that are read."""


def shapes_of_batches(loader: object, steps: int | None = None) -> ForeseenSizes:
    """Returns which sizes of a loader's batches will vary. `steps` is the number of batches to be taken, if known."""
    if not isinstance(loader, DataLoader):
        return ForeseenSizes()
    batches = loader.batch_sampler
    size = getattr(batches, "batch_size", None)
    if not size:
        return ForeseenSizes()
    try:
        count = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:  # an iterable dataset has no length
        return ForeseenSizes()
    reaches_the_last = steps is None or steps >= len(loader)
    keeps_the_last = not getattr(batches, "drop_last", False) and not _pads_last_batch(batches)
    return ForeseenSizes(
        lengths=_lengths_differ(loader.dataset, loader.collate_fn, size),
        batch=bool(count % size) and count > size and keeps_the_last and reaches_the_last,
    )


def _pads_last_batch(batches: object) -> bool:
    """True if accelerate fills the last batches of several processes with samples from the beginning."""
    return getattr(batches, "num_processes", 1) > 1 and bool(getattr(batches, "even_batches", False))


def _lengths_differ(dataset: Any, collate: object, size: int) -> bool:
    """True if batches in the order of the dataset, each padded to its longest sample, differ in length."""
    collate = getattr(collate, "data_collator", collate)  # a Trainer wraps it to remove columns
    if isinstance(collate, PackingCollator):
        return collate.pad_to_multiple_of != collate.max_length
    if getattr(collate, "padding", True) in (False, "max_length"):
        return False
    multiple = getattr(collate, "pad_to_multiple_of", None) or 1
    columns = _columns(dataset, min(MAX_BATCHES * size, MAX_SAMPLES))
    for lengths in columns:
        batches = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        if len({-(-max(batch) // multiple) for batch in batches}) > 1:
            return True
    return False


def _columns(dataset: Any, count: int) -> list[list[int]]:
    """Returns the lengths of the first samples, for each sequence column."""
    if isinstance(dataset, list | tuple):
        rows = [row for row in dataset[:count] if isinstance(row, Mapping)]
        found = [[row.get(name) for row in rows] for name in _sequence_columns(rows[0] if rows else ())]
    elif hasattr(dataset, "select_columns") and dataset.format["type"] in LISTED:  # a table of the package `datasets`
        names = _sequence_columns(dataset.column_names)  # other columns may hold pictures
        found = list(map(list, dataset.select_columns(names)[:count].values())) if names else []
    else:
        return []
    return [[len(value) for value in column if _has_length(value)] for column in found if all(map(_has_length, column))]


def _sequence_columns(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in SEQUENCE_COLUMNS or name.endswith("_ids")]


def _has_length(value: object) -> TypeGuard[Sized]:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1
