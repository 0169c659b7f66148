"""Values that are added up at places that a tensor lists, which is the gradient of choosing rows, faster than eager."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def index_put(base: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """What `aten.index_put` gives, but for the order of sums.

    On a processor it adds number by number, each as an atomic operation where several threads do so: 4.4 ms for 2,048
    rows of 384, which `index_add` adds row by row, in their order, in 0.23.
    """
    if accumulate and (index := _rows(base, indices, values)) is not None:
        place = index.reshape(-1)
        place = torch.where(place < 0, place + len(base), place)
        with suppress(RuntimeError):  # a place that is not there, of which eager's own error is to tell
            return base.index_add(0, place, values.reshape(len(place), *base.shape[1:]))
    result: Tensor = aten.index_put.default(base, indices, values, accumulate)
    return result


def _rows(base: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor | None:
    """What lists the rows that whole values are added to; None where it is anything else."""
    (index, *more) = indices
    if more or index is None or index.dtype not in (torch.int64, torch.int32) or not base.is_cpu:
        return None
    fits: Any = values.dtype == base.dtype and values.shape == (*index.shape, *base.shape[1:])
    return index if fits else None
