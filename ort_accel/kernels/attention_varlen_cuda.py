"""Attention over packed sequences on a CUDA device by PyTorch's variable-length kernels: one launch for all sequences.

Flash attention runs the types of 16 bits. The memory-efficient kernel runs float32; its backward repeats the forward,
because the kernel's sums are laid out by the longest sequence and not by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

CAUSAL_FROM_TOP_LEFT = 1
"""The memory-efficient kernel's number for a mask that starts at the first query and the first key."""
FLASH_WIDTH, EFFICIENT_WIDTH = 8, 4
"""Divisors that each kernel asks of the width of a head."""
WIDEST_FLASH_HEAD = 256


class Lengths(NamedTuple):
    """The beginnings and ends of packed sequences, as arguments of a variable-length kernel."""

    queries: Tensor
    """The first row of each sequence and the end of the last, as int32 on the device."""
    keys: Tensor
    longest_query: int
    longest_key: int
    is_causal: bool


def lengths_of(
    queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], is_causal: bool, device: torch.device
) -> Lengths | None:
    """Return the lengths of sequences with these (begin, end) rows; None where one launch cannot run them.

    Sequences must follow each other without a gap. Flash attention aligns a causal mask with the last key, so causal
    sequences must have as many queries as keys.
    """
    if not (_are_consecutive(queries) and _are_consecutive(keys)):
        return None
    query_lengths, key_lengths = ([end - begin for begin, end in side] for side in (queries, keys))
    if 0 in query_lengths or 0 in key_lengths or (is_causal and query_lengths != key_lengths):
        return None
    starts = [[0, *(end for _, end in side)] for side in (queries, keys)]
    of_queries, of_keys = (torch.tensor(side, dtype=torch.int32, device=device) for side in starts)
    return Lengths(of_queries, of_keys, max(query_lengths), max(key_lengths), is_causal)


def _are_consecutive(rows: Sequence[tuple[int, int]]) -> bool:
    return bool(rows) and rows[0][0] == 0 and all(one[1] == other[0] for one, other in pairwise(rows))


def runs(query: Tensor, value: Tensor) -> bool:
    """True if a variable-length kernel has this type and this width of heads."""
    width = query.shape[-1]
    if value.shape[-1] != width:
        return False
    if _is_half(query):
        return width % FLASH_WIDTH == 0 and width <= WIDEST_FLASH_HEAD
    return query.dtype == torch.float32 and width % EFFICIENT_WIDTH == 0


def forward(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithm of each row's sum as [rows, heads]; zeros where the backward needs none."""
    if _is_half(query):
        given = (*map(_dense, (query, key, value)), *lengths[:4], 0.0, lengths.is_causal, False)
        out, sums, *_ = aten._flash_attention_forward(*given, scale=scale)
        return out, sums.transpose(0, 1).contiguous()
    out, *_ = _efficient(query, key, value, lengths, scale, with_sums=False)
    return out.squeeze(0), query.new_zeros(query.shape[:2])


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    results: tuple[Tensor, Tensor],
    lengths: Lengths,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    out, sums = results
    if _is_half(query):
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of a dropout
        given = (*map(_dense, (grad, query, key, value)), out, sums.transpose(0, 1).contiguous(), *lengths[:4], 0.0)
        of_query, of_key, of_value = aten._flash_attention_backward(
            *given, lengths.is_causal, unused, unused[0], scale=scale
        )
        return of_query, of_key, of_value
    out, sums, seed, offset, longest_query, longest_key = _efficient(query, key, value, lengths, scale, with_sums=True)
    forward_arguments = (*map(_batch, (grad, query, key, value)), None, out, lengths.queries, lengths.keys)
    kept = (longest_query, longest_key, sums, 0.0, seed, offset, _mask(lengths), False)
    *grads, _ = aten._efficient_attention_backward(*forward_arguments, *kept, scale=scale)
    of_query, of_key, of_value = (item.squeeze(0) for item in grads)
    return of_query, of_key, of_value


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scale: float | None, *, with_sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    batch = map(_batch, (query, key, value))
    found: tuple[Tensor, Tensor, Tensor, Tensor, int, int] = aten._efficient_attention_forward(
        *batch, None, *lengths[:4], 0.0, _mask(lengths), with_sums, scale=scale
    )
    return found


def _mask(lengths: Lengths) -> int:
    return CAUSAL_FROM_TOP_LEFT if lengths.is_causal else 0


def _is_half(query: Tensor) -> bool:
    return query.dtype in (torch.float16, torch.bfloat16)


def _dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _batch(rows: Tensor) -> Tensor:
    return _dense(rows).unsqueeze(0)
