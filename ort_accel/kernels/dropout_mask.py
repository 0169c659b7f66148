"""Drawing what a dropout keeps, as PyTorch draws it: the same numbers of the generator, the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

LIBRARY: Any = Library("ort_accel", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "kept(SymInt[] size, float probability, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)

CHUNK = 32768
"""So many numbers are drawn at a time: they stay in the cache, and PyTorch starts no threads for so few."""


def _kept(size: Sequence[int], probability: float, device: torch.device) -> Tensor:
    if device.type != "cpu" or not _compares():
        return torch.empty(size, dtype=torch.bool, device=device).bernoulli_(probability)
    count = prod(size)
    kept, numbers = torch.empty(count, dtype=torch.bool), torch.empty(min(count, CHUNK), dtype=torch.int64)
    for part in torch.ops.aten.split.Tensor(kept, CHUNK):
        numbers = numbers[: len(part)] if len(part) < len(numbers) else numbers
        _compare(numbers.random_(), probability, part)
    return kept.view(size)


def _compare(numbers: Tensor, probability: float, result: Tensor) -> None:
    """The last 53 bits of a number are a number below 1 in double precision."""
    torch.lt(numbers.bitwise_and_((1 << 53) - 1), ceil(probability * (1 << 53)), out=result)


@cache
def _compares() -> bool:
    """Whether `bernoulli` compares the bits of each number of the generator, as `_compare` does.

    Where it does, drawing and comparing apart takes two thirds of the time. On processors of Intel it leaves both to a
    library of theirs, which has other numbers.
    """
    drawn, compared = (torch.Generator().manual_seed(7) for _ in range(2))
    expected = torch.empty(4099, dtype=torch.bool).bernoulli_(0.3, generator=drawn)
    found = torch.empty(4099, dtype=torch.bool)
    _compare(torch.empty(4099, dtype=torch.int64).random_(generator=compared), 0.3, found)
    return torch.equal(expected, found) and torch.equal(drawn.get_state(), compared.get_state())


LIBRARY.impl("kept", _kept, "CompositeExplicitAutograd")


def _described(size: Sequence[int], probability: float, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.bool, device=device)


register_fake("ort_accel::kept", _described)

kept = torch.ops.ort_accel.kept.default
"""True where a dropout keeps, False where it drops: `kept(size, probability of keeping, device)`."""
