"""Attention over packed rows by the native library's kernels: all sequences in one call, no scores kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ort_accel.kernels.bit_mask import bytes_of
from ort_accel.kernels.packed_spans import MASKED, PackedSequence, Pairs
from ort_accel.native.attention import PackedAttention, Span
from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import run_kernel

Strides = tuple[int, int, int, int]


def runs(operands: Sequence[Tensor], pairs: Pairs) -> bool:
    """True if the native library runs an attention: in single precision, without a mask."""
    is_single = all(one.device.type == "cpu" and one.dtype == torch.float32 for one in operands)
    if not is_single or native_library() is None:
        return False
    sequences = pairs.parsed.sequences
    return all(one.masking != MASKED or not one.pairs for one in sequences) and _bits_are_regular(pairs)


def _bits_are_regular(pairs: Pairs) -> bool:
    """True if dropout's mask has a regular place for each pair of each sequence."""
    if pairs.kept is None:
        return True
    sides = [side for one in pairs.parsed.sequences if one.pairs for side in (one.queries, one.keys)]
    return pairs.kept.shape[-1] > 1 and all(side.positions is None for side in sides)


def forward(
    query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, keep: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the result, and the logarithm of each row's sum."""
    operands = map(_by_rows, (query, key, value))
    return _attention(pairs, keep, scale).forward(*operands)


def backward(
    grad: Tensor, operands: Sequence[Tensor], results: Sequence[Tensor], pairs: Pairs, keep: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    query, key, value = map(_by_rows, operands)
    out, logsumexp = results
    attention = _attention(pairs, keep, scale)
    return attention.backward(_by_rows(grad), query, key, value, _by_rows(out), logsumexp.contiguous())


def _attention(pairs: Pairs, keep: float, scale: float) -> PackedAttention:
    sequences = [one for one in pairs.parsed.sequences if one.pairs]
    if pairs.kept is None:
        return PackedAttention([_span(one, 0) for one in sequences], scale)
    strides = _strides(pairs.kept)
    spans = [_span(one, _first_bit(one, pairs.kept, strides)) for one in sequences]
    return PackedAttention(spans, scale, kept=_bits(pairs.kept), kept_strides=strides[1:3], keep=keep or 1.0)


def _span(sequence: PackedSequence, kept_begin: int) -> Span:
    queries, keys = sequence.queries, sequence.keys
    return Span(queries.begin, queries.end, keys.begin, keys.end, sequence.masking, kept_begin=kept_begin)


def _first_bit(sequence: PackedSequence, kept: Tensor, strides: Strides) -> int:
    """Returns where the bits of a sequence begin."""
    _, _, queries, keys = kept.shape
    first_query, first_key = sequence.queries.first % queries, sequence.keys.first % keys
    return sequence.number * strides[0] + first_query * strides[2] + first_key


def _strides(kept: Tensor) -> Strides:
    """Returns the distances in the packed mask; a dimension of size 1 is the same for all."""
    _, heads, queries, keys = kept.shape
    whole = (heads * queries * keys, queries * keys, keys, 1)
    batch, head, query, key = (0 if size == 1 else stride for size, stride in zip(kept.shape, whole, strict=True))
    return batch, head, query, key


def _bits(kept: Tensor) -> Tensor:
    """Returns a mask with eight of its values in a byte."""
    values = kept.contiguous().view(torch.uint8)
    bits = torch.empty(bytes_of(values.numel()), dtype=torch.uint8)
    run_kernel("pack_bits", values, values.numel(), bits)
    return bits


def _by_rows(tensor: Tensor) -> Tensor:
    """Returns a tensor whose numbers of a head lie side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
