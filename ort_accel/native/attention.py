"""Calls the library's attention kernels with tensors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import run_kernel


class Masking(IntEnum):
    """Each query attends to all keys, to those up to its own, or as the mask says."""

    FULL = 0
    CAUSAL = 1
    MASKED = 2


class Span(NamedTuple):
    """The rows of a sequence, and where its parts of the mask and of dropout's bits begin."""

    query_begin: int
    query_end: int
    key_begin: int
    key_end: int
    masking: int = Masking.FULL
    offset: int = 0
    """The first query's position, counted from the first key."""
    mask_begin: int = 0
    kept_begin: int = 0


class _HeadRows(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_stride", "head_stride", "sequence_stride")),
    ]


class _Attention(ctypes.Structure):
    """The struct of kernels/attention.h."""

    _fields_ = [
        ("spans", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "key_heads", "dim", "value_dim", "is_bfloat16")),
        *((name, ctypes.c_int64) for name in ("window", "threads")),
        ("scale", ctypes.c_float),
        ("kept_scale", ctypes.c_float),
        *((name, _HeadRows) for name in ("query", "key", "value", "out")),
        ("logsumexp", _HeadRows),
        ("mask", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("mask_type", "mask_head_stride", "mask_query_stride")),
        ("kept", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kept_bytes", "kept_head_stride", "kept_query_stride")),
        *((name, _HeadRows) for name in ("out_grad", "query_grad", "key_grad", "value_grad")),
    ]


MASK_TYPES = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3}


def takes(operands: Sequence[Tensor]) -> bool:
    """True if the native library is there and faster than PyTorch for such operands."""
    is_single = all(one.device.type == "cpu" and one.dtype == torch.float32 for one in operands)
    return is_single and native_library() is not None


def side_by_side(tensor: Tensor) -> Tensor:
    """Returns a tensor whose entries of the last dimension lie side by side, as the kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@dataclass(frozen=True)
class Attention:
    """Attention of sequences. Tensors have their numbers of a head side by side.

    They are [rows, heads, dim] for packed sequences, and [sequences, rows, heads, dim] for sequences of one length. The
    rows of a span are counted from the first row of all, or from the first row of its sequence.
    """

    spans: Sequence[Span]
    scale: float
    window: int = 0
    """A query attends to keys at a distance below it; 0 for all."""
    mask: Tensor | None = None
    """True where a query attends, or numbers to add; the last dimension lies side by side."""
    mask_strides: tuple[int, int] = (0, 0)
    """The distances of two heads and of two queries in the mask."""
    kept: Tensor | None = None
    """Bits of dropout, 1 for each weight that is kept."""
    kept_strides: tuple[int, int] = (0, 0)
    keep: float = 1.0
    level: int | None = None
    threads: int | None = None
    """For how many threads sequences are divided; by default PyTorch's."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the results, and the logarithms of the rows' sums."""
        make = query.new_empty if self._covers(query, 0) else query.new_zeros
        out, logsumexp = make((*query.shape[:-1], value.shape[-1])), make(query.shape[:-1], dtype=torch.float32)
        self._run("attention_forward", query, key, value, out, logsumexp)
        return out, logsumexp

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of queries, keys and values."""
        grads = [
            one.new_empty(one.shape) if self._covers(one, side) else one.new_zeros(one.shape)
            for one, side in ((query, 0), (key, 2), (value, 2))
        ]
        names = ("out_grad", "query_grad", "key_grad", "value_grad")
        rows = {name: _rows(one) for name, one in zip(names, (grad, *grads), strict=True)}
        self._run("attention_backward", query, key, value, out, logsumexp, rows)
        return grads[0], grads[1], grads[2]

    def _covers(self, rows: Tensor, side: int) -> bool:
        """True if each row belongs to a sequence; `side` is where a span has the range of these rows."""
        return sum(span[side + 1] - span[side] for span in self.spans) == math.prod(rows.shape[:-2])

    def _run(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        grads: dict[str, _HeadRows] | None = None,
    ) -> None:
        spans = (ctypes.c_int64 * (8 * len(self.spans)))(*(number for span in self.spans for number in span))
        sizes = (len(self.spans), query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1])
        threads = torch.get_num_threads() if self.threads is None else self.threads
        given = _Attention(
            ctypes.addressof(spans), *sizes, query.dtype == torch.bfloat16, self.window, threads, self.scale,
            1 / self.keep,
            *map(_rows, (query, key, value, out, logsumexp.unsqueeze(-1))),
            *_mask_arguments(self.mask, self.mask_strides), *_kept_arguments(self.kept, self.kept_strides),
        )  # fmt: skip
        for field, rows in (grads or {}).items():
            setattr(given, field, rows)
        run_kernel(name, ctypes.addressof(given), level=self.level)


def _rows(tensor: Tensor) -> _HeadRows:
    assert tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    *sequence, row, head, _ = tensor.stride()
    return _HeadRows(tensor.data_ptr(), row, head, *sequence)


def _mask_arguments(mask: Tensor | None, strides: tuple[int, int]) -> tuple[int | None, int, int, int]:
    return (None, 0, 0, 0) if mask is None else (mask.data_ptr(), MASK_TYPES[mask.dtype], *strides)


def _kept_arguments(kept: Tensor | None, strides: tuple[int, int]) -> tuple[int | None, int, int, int]:
    return (None, 0, 0, 0) if kept is None else (kept.data_ptr(), kept.numel(), *strides)
