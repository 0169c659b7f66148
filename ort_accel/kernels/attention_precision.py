"""The type in which PyTorch's fused attention for the CPU is faster; its sums are in single precision anyway."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten

FLASH_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_MOST_TOKENS: dict[tuple[object, torch.dtype], float] = {
    (FLASH_BACKWARD, torch.bfloat16): 128,
    (FLASH_BACKWARD, torch.float16): float("inf"),
    (FLASH_FORWARD, torch.float16): float("inf"),
}
"""The longest sequences for which single precision is faster."""


def is_faster_in_float32(kernel: object, dtype: torch.dtype, tokens: int) -> bool:
    """True if a kernel is faster on sequences of so many tokens when they are cast to single precision first."""
    return tokens <= _MOST_TOKENS.get((kernel, dtype), 0)


def in_faster_type(kernel: object, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return operands of [batch, heads, tokens, width] in the type in which the kernel is faster."""
    tokens = max(operand.shape[2] for operand in operands)
    wide = is_faster_in_float32(kernel, operands[0].dtype, tokens)
    return [operand.to(torch.float32) for operand in operands] if wide else operands


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers that are added to the scores."""
    if mask.dtype == torch.bool:
        return mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.to(dtype)
