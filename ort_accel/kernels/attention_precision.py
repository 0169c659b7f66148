"""Where PyTorch's fused attention for the CPU is faster in single precision than in 16 bits.

Both directions of the kernel add up in single precision anyway, so the results only become more precise. Milliseconds
for 6 heads of 64, with casts, two threads and torch 2.13, on an AMD EPYC (Zen 4, AVX512-BF16) and on an Intel Xeon
with AMX:

    gradient, batch x tokens    8 x 32   8 x 64   8 x 128   8 x 192   4 x 256   2 x 512
    Zen 4, in bfloat16            1.54     3.58      8.02                7.96
    Zen 4, in float16             2.29     8.53      34.4                68.9
    Zen 4, in float32             0.55     1.48      4.19                8.31
    Xeon, in bfloat16             4.33     9.17      19.1      17.8      13.2      17.2
    Xeon, in float16              4.45     9.58      20.7      23.9      19.4      22.6
    Xeon, in float32              0.66     2.23      6.77      17.2      10.3      16.9

The forward in float32 takes as long as in bfloat16 on the Zen 4 and up to five times as long on the Xeon. In float16 it
takes 1.7 to 2.4 times as long as in float32 on the Zen 4, and about as long on the Xeon: there mostly a tenth less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_LONGEST: dict[tuple[Any, torch.dtype], float] = {
    (BACKWARD, torch.bfloat16): 128,
    (BACKWARD, torch.float16): float("inf"),
    (FORWARD, torch.float16): float("inf"),
}
"""Tokens, as far as single precision is faster."""


def is_faster_wide(kernel: Any, dtype: torch.dtype, tokens: int) -> bool:
    """Whether a kernel is faster on sequences of so many tokens if these are cast to single precision first."""
    return tokens <= _LONGEST.get((kernel, dtype), 0)


def in_faster_type(kernel: Any, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Operands of [batch, heads, tokens, width], in the type in which the kernel is faster."""
    tokens = max(operand.shape[2] for operand in operands)
    wide = is_faster_wide(kernel, operands[0].dtype, tokens)
    return [operand.to(torch.float32) for operand in operands] if wide else operands


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores."""
    if mask.dtype == torch.bool:
        return mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.to(dtype)
