"""The interface of attention kernels over [batch, heads, tokens, width], and PyTorch's fused kernel for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from ort_accel.kernels.attention_precision import FLASH_BACKWARD, FLASH_FORWARD, additive_mask, in_faster_type


class AttentionOptions(NamedTuple):
    """The options of an attention."""

    mask: Tensor | None
    """Booleans, or numbers that are added to the scores."""
    is_causal: bool
    scale: float | None
    kept: Tensor | None = None
    """1 where dropout keeps a weight, 0 where it drops it."""
    keep: float = 1.0
    """The probability with which dropout keeps a weight."""


class AttentionFailed(Exception):
    """Kernels could not run a dropout after all, for lack of memory, say."""


class AttentionKernels(Protocol):
    """Both directions of an attention in which groups of heads may share their keys."""

    def drops(self, query: Tensor, pairs: int) -> bool:
        """True if these kernels run a dropout of so many weights at once; they may fail at it (`AttentionFailed`)."""

    def forward(self, operands: Sequence[Tensor], how: AttentionOptions) -> Sequence[Tensor]:
        """Take query, key and value; return the result and, from PyTorch's kernel, the logarithm of each row's sum."""

    def backward(self, operands: Sequence[Tensor], how: AttentionOptions) -> Sequence[Tensor]:
        """Take the result's gradient, query, key, value and both results; return the three gradients."""


class PyTorchKernels:
    """PyTorch's fused kernel for the CPU. It runs, and returns its results, in the faster type."""

    def drops(self, *_: object) -> bool:
        """Return False: the kernel has no dropout."""
        return False

    def forward(self, operands: Sequence[Tensor], how: AttentionOptions) -> Sequence[Tensor]:
        """Return the result, and the logarithm of each row's sum."""
        operands = in_faster_type(FLASH_FORWARD, operands)
        results: Sequence[Tensor] = FLASH_FORWARD(*operands, **_keywords(how, operands[0].dtype))
        return results

    def backward(self, operands: Sequence[Tensor], how: AttentionOptions) -> Sequence[Tensor]:
        """Return the gradients of query, key and value."""
        *operands, sums = operands
        operands = in_faster_type(FLASH_BACKWARD, operands)
        results: Sequence[Tensor] = FLASH_BACKWARD(*operands, sums, 0.0, **_keywords(how, operands[0].dtype))
        return results


PYTORCH_ATTENTION = PyTorchKernels()


class _Keywords(TypedDict):
    is_causal: bool
    attn_mask: Tensor | None
    scale: float | None


def _keywords(how: AttentionOptions, dtype: torch.dtype) -> _Keywords:
    mask = None if how.mask is None else additive_mask(how.mask, dtype)
    return {"is_causal": how.is_causal, "attn_mask": mask, "scale": how.scale}
