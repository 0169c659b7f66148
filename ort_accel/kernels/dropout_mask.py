"""The operator that draws a dropout mask: the same bits from the same numbers of the generator as PyTorch's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, prod
from threading import Lock

import torch
from torch import Tensor

from ort_accel.kernels.library import ANY_DEVICE, define, fake
from ort_accel.native.library import kernel, native_library

CHUNK_NUMBERS = 32768
"""Numbers that are drawn at a time: they stay in the cache, and PyTorch starts no threads for so few."""

Draw = Callable[[torch.Generator, float, Tensor], None]

_one_at_a_time = Lock()


def _kept(size: Sequence[int], probability: float, device: torch.device) -> Tensor:
    if device.type != "cpu" or not _bernoulli_compares_bits():
        return torch.empty(size, dtype=torch.bool, device=device).bernoulli_(probability)
    if draw := _native_draw():
        mask = torch.empty(size, dtype=torch.bool)
        draw(torch.default_generator, probability, mask)
        return mask
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
def _native_draw() -> Draw | None:
    """Returns the native kernel that draws a mask; None where it is missing, or differs from PyTorch."""
    if native_library() is None:
        return None
    function = kernel("draw_mask", ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p)

    def draw(generator: torch.Generator, probability: float, mask: Tensor) -> None:
        with _one_at_a_time:
            state = generator.get_state()
            function(state.data_ptr(), mask.numel(), probability, mask.data_ptr())
            generator.set_state(state)

    return draw if _draws_as_bernoulli(draw) else None


@cache
def _bernoulli_compares_bits() -> bool:
    """True if `bernoulli` compares the bits of each number of the generator, as `_compare` does.

    It does not on Intel's processors where PyTorch was built with MKL's random numbers; the wheels of PyPI are not.
    """

    def draw(generator: torch.Generator, probability: float, mask: Tensor) -> None:
        _compare(torch.empty(len(mask), dtype=torch.int64).random_(generator=generator), probability, mask)

    return _draws_as_bernoulli(draw)


def _draws_as_bernoulli(draw: Draw) -> bool:
    """True if a way to draw gives the same mask as PyTorch, and leaves the same state behind."""
    theirs, ours = (torch.Generator().manual_seed(7) for _ in range(2))
    expected = torch.empty(4099, dtype=torch.bool).bernoulli_(0.3, generator=theirs)
    found = torch.empty(4099, dtype=torch.bool)
    draw(ours, 0.3, found)
    return torch.equal(expected, found) and torch.equal(theirs.get_state(), ours.get_state())


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
