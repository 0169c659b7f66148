"""The operator that draws a dropout mask: the same bits from the same numbers of the generator as PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil, prod

import torch
from torch import Tensor

from ort_accel.kernels.library import ANY_DEVICE, define, fake

CHUNK_NUMBERS = 32768
"""Numbers that are drawn at a time: they stay in the cache, and PyTorch starts no threads for so few."""


def _kept(size: Sequence[int], probability: float, device: torch.device) -> Tensor:
    if device.type != "cpu" or not _bernoulli_compares_bits():
        return torch.empty(size, dtype=torch.bool, device=device).bernoulli_(probability)
    count = prod(size)
    kept, numbers = torch.empty(count, dtype=torch.bool), torch.empty(min(count, CHUNK_NUMBERS), dtype=torch.int64)
    for part in torch.ops.aten.split.Tensor(kept, CHUNK_NUMBERS):
        numbers = numbers[: len(part)] if len(part) < len(numbers) else numbers
        _compare(numbers.random_(), probability, part)
    return kept.view(size)


def _compare(numbers: Tensor, probability: float, result: Tensor) -> None:
    """Compare the last 53 bits of each number, a double below 1, with the probability."""
    torch.lt(numbers.bitwise_and_((1 << 53) - 1), ceil(probability * (1 << 53)), out=result)


@cache
def _bernoulli_compares_bits() -> bool:
    """True if `bernoulli` compares bits as the faster `_compare` does; on Intel's processors MKL draws others."""
    drawn, compared = (torch.Generator().manual_seed(7) for _ in range(2))
    expected = torch.empty(4099, dtype=torch.bool).bernoulli_(0.3, generator=drawn)
    found = torch.empty(4099, dtype=torch.bool)
    _compare(torch.empty(4099, dtype=torch.int64).random_(generator=compared), 0.3, found)
    return torch.equal(expected, found) and torch.equal(drawn.get_state(), compared.get_state())


define(
    "kept(SymInt[] size, float probability, Device device) -> Tensor",
    _kept,
    ANY_DEVICE,
    tags=[torch.Tag.nondeterministic_seeded],
)


@fake("kept")
def _(size: Sequence[int], probability: float, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.bool, device=device)


kept = torch.ops.ort_accel.kept.default
"""True where a dropout keeps, False where it drops: `kept(size, probability of keeping, device)`."""
