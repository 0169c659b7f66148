"""Kernels for attention over [batch, heads, tokens, width]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ort_accel.kernels.attention_precision import BACKWARD, FORWARD, added, in_faster_type


class How(NamedTuple):
    """Which keys a query looks at, what scores are multiplied by, and what a dropout kept of the weights."""

    mask: Tensor | None
    """Booleans, or numbers that are added to the scores."""
    is_causal: bool
    scale: float | None
    kept: Tensor | None = None
    """1 where a weight is kept, 0 where it is dropped."""
    keep: float = 1.0
    """How probably each was kept."""


class Failed(Exception):
    """Kernels could not run a dropout after all, for lack of memory, say."""


class Kernels(Protocol):
    """Both directions of an attention in which groups of heads may share their keys."""

    def drops(self, query: Tensor, pairs: int) -> bool:
        """Whether these run a dropout, of so many weights at once; they may fail at it (`Failed`)."""

    def forward(self, operands: Sequence[Tensor], how: How) -> Sequence[Tensor]:
        """Of query, key and value: the result, and what only PyTorch's kernel keeps for its gradient, the logarithm of
        each row's sum."""

    def backward(self, operands: Sequence[Tensor], how: How) -> Sequence[Tensor]:
        """Of the result's gradient, query, key, value and both results: the gradients of query, key and value."""


class PyTorchKernels:
    """PyTorch's fused kernel for the CPU, in the type in which it is faster, and its results in that type."""

    def drops(self, *_: Any) -> bool:
        """It has no dropout."""
        return False

    def forward(self, operands: Sequence[Tensor], how: How) -> Sequence[Tensor]:
        """The result, and the logarithm of each row's sum."""
        operands = in_faster_type(FORWARD, operands)
        results: Sequence[Tensor] = FORWARD(*operands, **_as_told(how, operands[0].dtype))
        return results

    def backward(self, operands: Sequence[Tensor], how: How) -> Sequence[Tensor]:
        """The gradients of query, key and value."""
        *operands, sums = operands
        operands = in_faster_type(BACKWARD, operands)
        results: Sequence[Tensor] = BACKWARD(*operands, sums, 0.0, **_as_told(how, operands[0].dtype))
        return results


PYTORCH = PyTorchKernels()


def _as_told(how: How, dtype: torch.dtype) -> dict[str, Any]:
    mask = None if how.mask is None else added(how.mask, dtype)
    return {"is_causal": how.is_causal, "attn_mask": mask, "scale": how.scale}
