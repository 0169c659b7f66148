"""Fused attention for the CPU over [batch, heads, tokens, width]: the native library's, or PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from ort_accel.kernels.attention_precision import FLASH_BACKWARD, FLASH_FORWARD, additive_mask, in_faster_type
from ort_accel.native.attention import MASK_TYPES, Attention, Masking, Span, side_by_side, takes


class AttentionOptions(NamedTuple):
    """The options of an attention."""

    mask: Tensor | None
    """Booleans, or numbers that are added to the scores."""
    is_causal: bool
    scale: float | None


def fused_attention(operands: Sequence[Tensor], options: AttentionOptions) -> Sequence[Tensor]:
    """Take query, key and value; return the result, and the logarithm of each row's sum, in the faster type."""
    operands = in_faster_type(FLASH_FORWARD, operands)
    if _is_native(operands):
        query, key, value = map(_by_rows, operands)
        return [one.transpose(1, 2) for one in _native(query, key, options).forward(query, key, value)]
    results: Sequence[Tensor] = FLASH_FORWARD(*operands, **_keywords(options, operands[0].dtype))
    return results


def fused_attention_backward(operands: Sequence[Tensor], options: AttentionOptions) -> Sequence[Tensor]:
    """Take the result's gradient, query, key, value and both results; return the gradients of query, key and value."""
    *operands, sums = operands
    operands = in_faster_type(FLASH_BACKWARD, operands)
    if _is_native(operands):
        grad, query, key, value, out = map(_by_rows, operands)
        grads = _native(query, key, options).backward(grad, query, key, value, out, sums.transpose(1, 2))
        return [one.transpose(1, 2) for one in grads]
    results: Sequence[Tensor] = FLASH_BACKWARD(*operands, sums, 0.0, **_keywords(options, operands[0].dtype))
    return results


def _is_native(operands: Sequence[Tensor]) -> bool:
    return takes(operands) and all(one.numel() for one in operands)


def _by_rows(tensor: Tensor) -> Tensor:
    """Return [batch, tokens, heads, width], with the numbers of a head side by side."""
    return side_by_side(tensor.transpose(1, 2))


def _native(query: Tensor, key: Tensor, options: AttentionOptions) -> Attention:
    (batch, queries, heads, width), keys = query.shape, key.shape[1]
    scale = width**-0.5 if options.scale is None else options.scale
    if options.mask is None:
        masking = Masking.CAUSAL if options.is_causal else Masking.FULL
        return Attention([Span(0, queries, 0, keys, masking)] * batch, scale)
    mask = options.mask if options.mask.dtype in MASK_TYPES else options.mask.to(torch.float32)
    mask = side_by_side(mask.expand(batch, heads, queries, keys))
    spans = [Span(0, queries, 0, keys, Masking.MASKED, mask_begin=sample * mask.stride(0)) for sample in range(batch)]
    return Attention(spans, scale, 0, mask, (mask.stride(1), mask.stride(2)))


class _Keywords(TypedDict):
    is_causal: bool
    attn_mask: Tensor | None
    scale: float | None


def _keywords(options: AttentionOptions, dtype: torch.dtype) -> _Keywords:
    mask = None if options.mask is None else additive_mask(options.mask, dtype)
    return {"is_causal": options.is_causal, "attn_mask": mask, "scale": options.scale}
