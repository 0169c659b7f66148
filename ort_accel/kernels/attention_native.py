"""Attention over packed rows by the native library's kernels: all sequences in one call, no scores kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ort_accel.kernels.bit_mask import to_bits
from ort_accel.kernels.packed_spans import MASKED, PackedSequence, Pairs
from ort_accel.native.attention import MASK_TYPES, Attention, Span, side_by_side, takes

Strides = tuple[int, int, int, int]


def runs(operands: Sequence[Tensor], pairs: Pairs) -> bool:
    """True if the native library runs an attention: tokens of a masked sequence must have no gaps."""
    if not takes(operands):
        return False
    sequences = [one for one in pairs.parsed.sequences if one.pairs]
    masked = [one for one in sequences if one.masking == MASKED]
    return _is_regular(pairs.mask, masked) and _is_regular(pairs.kept, sequences)


def _is_regular(of_pairs: Tensor | None, sequences: Sequence[PackedSequence]) -> bool:
    """True if a tensor of [batch, heads, queries, keys] has the pairs of each of these sequences at regular places."""
    if of_pairs is None or not sequences:
        return True
    has_type = of_pairs.dtype in MASK_TYPES and of_pairs.shape[-1] > 1
    return has_type and all(side.positions is None for one in sequences for side in (one.queries, one.keys))


def forward(
    query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, keep: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the result, and the logarithm of each row's sum."""
    operands = map(side_by_side, (query, key, value))
    return _attention(pairs, keep, scale).forward(*operands)


def backward(
    grad: Tensor, operands: Sequence[Tensor], results: Sequence[Tensor], pairs: Pairs, keep: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    query, key, value = map(side_by_side, operands)
    out, logsumexp = results
    attention = _attention(pairs, keep, scale)
    return attention.backward(side_by_side(grad), query, key, value, side_by_side(out), logsumexp.contiguous())


def _attention(pairs: Pairs, keep: float, scale: float) -> Attention:
    sequences = [one for one in pairs.parsed.sequences if one.pairs]
    mask = (
        side_by_side(pairs.mask) if pairs.mask is not None and any(one.masking == MASKED for one in sequences) else None
    )
    kept = None if pairs.kept is None else pairs.kept.contiguous()
    mask_strides, kept_strides = ((0, 0, 0, 0) if one is None else _strides(one) for one in (mask, kept))
    spans = [
        Span(
            one.queries.begin, one.queries.end, one.keys.begin, one.keys.end, one.masking,
            mask_begin=0 if mask is None or one.masking != MASKED else _first_pair(one, mask, mask_strides),
            kept_begin=0 if kept is None else _first_pair(one, kept, kept_strides),
        )
        for one in sequences
    ]  # fmt: skip
    bits = None if kept is None else to_bits(kept)
    return Attention(spans, scale, 0, mask, mask_strides[1:3], bits, kept_strides[1:3], keep=keep or 1.0)


def _first_pair(sequence: PackedSequence, of_pairs: Tensor, strides: Strides) -> int:
    """Returns the place of a sequence's first pair within a tensor of [batch, heads, queries, keys]."""
    _, _, queries, keys = of_pairs.shape
    first_query, first_key = sequence.queries.first % queries, sequence.keys.first % keys
    batch, _, query, _ = strides
    return sequence.sample(of_pairs) * batch + first_query * query + first_key


def _strides(of_pairs: Tensor) -> Strides:
    """Returns the strides of a tensor; a dimension of size 1 is the same for all."""
    batch, head, query, key = (
        0 if size == 1 else stride for size, stride in zip(of_pairs.shape, of_pairs.stride(), strict=True)
    )
    return batch, head, query, key
