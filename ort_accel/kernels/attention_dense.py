"""PyTorch's fused attention for the CPU over [batch, heads, tokens, width], in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from ort_accel.kernels.attention_precision import FLASH_BACKWARD, FLASH_FORWARD, additive_mask, in_faster_type


class AttentionOptions(NamedTuple):
    """The options of an attention."""

    mask: Tensor | None
    """Booleans, or numbers that are added to the scores."""
    is_causal: bool
    scale: float | None


def fused_attention(operands: Sequence[Tensor], options: AttentionOptions) -> Sequence[Tensor]:
    """Take query, key and value; return the result, and the logarithm of each row's sum, in the faster type."""
    operands = in_faster_type(FLASH_FORWARD, operands)
    results: Sequence[Tensor] = FLASH_FORWARD(*operands, **_keywords(options, operands[0].dtype))
    return results


def fused_attention_backward(operands: Sequence[Tensor], options: AttentionOptions) -> Sequence[Tensor]:
    """Take the result's gradient, query, key, value and both results; return the gradients of query, key and value."""
    *operands, sums = operands
    operands = in_faster_type(FLASH_BACKWARD, operands)
    results: Sequence[Tensor] = FLASH_BACKWARD(*operands, sums, 0.0, **_keywords(options, operands[0].dtype))
    return results


class _Keywords(TypedDict):
    is_causal: bool
    attn_mask: Tensor | None
    scale: float | None


def _keywords(options: AttentionOptions, dtype: torch.dtype) -> _Keywords:
    mask = None if options.mask is None else additive_mask(options.mask, dtype)
    return {"is_causal": options.is_causal, "attn_mask": mask, "scale": options.scale}
