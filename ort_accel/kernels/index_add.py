"""`index_put` with accumulation, the gradient of an index, by `index_add` where whole rows are added."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

aten = torch.ops.aten


def index_put(base: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Return the result of `aten.index_put`, but for the order of sums.

    On the CPU, PyTorch's kernel adds number by number, with atomic operations between threads; `index_add` adds row by
    row, in the order of the rows.
    """
    if accumulate and (index := _row_index(base, indices, values)) is not None:
        rows = index.reshape(-1)
        rows = torch.where(rows < 0, rows + len(base), rows)
        with suppress(RuntimeError):  # an index that is out of range, for which the next call raises eager's own error
            return base.index_add(0, rows, values.reshape(len(rows), *base.shape[1:]))
    result: Tensor = aten.index_put.default(base, indices, values, accumulate)
    return result


def _row_index(base: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor | None:
    """Return the index of the rows that whole values are added to; None for any other index."""
    (index, *more) = indices
    if more or index is None or index.dtype not in (torch.int64, torch.int32) or not base.is_cpu:
        return None
    fits = values.dtype == base.dtype and values.shape == (*index.shape, *base.shape[1:])
    return index if fits else None
