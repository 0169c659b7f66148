"""The operators that draw a dropout mask: the same bits from the same numbers of the generator as PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, prod
from threading import Lock

import torch
from torch import Tensor

from ort_accel.kernels.bit_mask import bytes_of
from ort_accel.kernels.library import ANY_DEVICE, define, fake
from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import run_kernel

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


def _kept_bits(size: Sequence[int], probability: float, device: torch.device) -> Tensor:
    if device.type != "cpu" or not _bernoulli_compares_bits() or not _native_draw():
        bits: Tensor = torch.ops.ort_accel.to_bits(_kept(size, probability, device))
        return bits
    bits = torch.empty(bytes_of(prod(size)), dtype=torch.uint8)
    _draw("draw_bits", torch.default_generator, probability, prod(size), bits)
    return bits


def _draw(kernel: str, generator: torch.Generator, probability: float, count: int, into: Tensor) -> None:
    """Draws by a native kernel, and moves the generator on."""
    with _one_at_a_time:
        state = generator.get_state()
        run_kernel(kernel, state, count, float(probability), into)
        generator.set_state(state)


def _compare(numbers: Tensor, probability: float, result: Tensor) -> None:
    """Compare the last 53 bits of each number, a double below 1, with the probability."""
    torch.lt(numbers.bitwise_and_((1 << 53) - 1), ceil(probability * (1 << 53)), out=result)


@cache
def _native_draw() -> Draw | None:
    """Returns the native kernel that draws a mask; None where it is missing, or differs from PyTorch."""
    if native_library() is None:
        return None

    def draw(generator: torch.Generator, probability: float, mask: Tensor) -> None:
        _draw("draw_mask", generator, probability, mask.numel(), mask)

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


for _name, _function in (("kept", _kept), ("kept_bits", _kept_bits)):
    define(
        f"{_name}(SymInt[] size, float probability, Device device) -> Tensor",
        _function,
        ANY_DEVICE,
        tags=[torch.Tag.nondeterministic_seeded],
    )


@fake("kept")
def _(size: Sequence[int], probability: float, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.bool, device=device)


@fake("kept_bits")
def _(size: Sequence[int], probability: float, device: torch.device) -> Tensor:
    return torch.empty([bytes_of(prod(size))], dtype=torch.uint8, device=device)


kept = torch.ops.ort_accel.kept.default
"""True where a dropout keeps, False where it drops: `kept(size, probability of keeping, device)`."""

kept_bits = torch.ops.ort_accel.kept_bits.default
"""The same mask, with eight of its elements in a byte."""
