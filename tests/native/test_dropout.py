"""Dropout draws eager's numbers to the bit, and leaves the generator as eager does."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ort_accel.kernels import dropout_mask
from ort_accel.native.run_kernel import ELEMENTS, run_kernel
from tests.native.levels import DTYPES, LEVELS, SIZES, same_bits, with_special_values

aten = torch.ops.aten


def generators(seed, consumed):
    """Two generators in the same state, after a number of draws of one word each."""
    found = [torch.Generator().manual_seed(seed) for _ in range(2)]
    for generator in found:
        if consumed:
            torch.empty(consumed, dtype=torch.int32).random_(generator=generator)
    return found


def unpacked(bits, count):
    return (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[:count].bool()


def by_comparison(count, probability, generator):
    """Eager's draws where each element has its own probability: the same numbers, on every processor."""
    return torch.empty(count, dtype=torch.bool).bernoulli_(
        torch.full((count,), probability, dtype=torch.float64), generator=generator
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("consumed", [0, 1, 2, 311, 623, 624, 625])
@pytest.mark.parametrize("count", [*SIZES, 311, 312, 313, 624, 7487, 7488, 7489, 200_001])
def test_masks_have_eagers_bits_and_leave_eagers_state(count, consumed, level):
    eager, ours = generators(count, consumed)
    expected, state = by_comparison(count, 0.9, eager), ours.get_state()
    mask = torch.zeros(count, dtype=torch.bool)
    run_kernel("draw_mask", state, count, 0.9, mask, level=level)
    assert torch.equal(mask, expected)
    assert torch.equal(state, eager.get_state())

    bits, state = torch.full(((count + 7) // 8,), 255, dtype=torch.uint8), ours.get_state()
    run_kernel("draw_bits", state, count, 0.9, bits, level=level)
    assert torch.equal(unpacked(bits, count), expected)
    assert torch.equal(state, eager.get_state())
    assert not count % 8 or bits[-1] >> count % 8 == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_state_goes_on_over_many_draws(level):
    eager, ours = generators(5, 0)
    for count in (3, 0, 1000, 1, 20_000, 312, 311):
        state, mask = ours.get_state(), torch.zeros(count, dtype=torch.bool)
        run_kernel("draw_mask", state, count, 0.25, mask, level=level)
        ours.set_state(state)
        assert torch.equal(mask, by_comparison(count, 0.25, eager))
    assert torch.equal(torch.rand(9, generator=ours), torch.rand(9, generator=eager))
    assert torch.equal(torch.randn(9, generator=ours), torch.randn(9, generator=eager))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("probability", [0.0, 1.0, 0.5, 1e-9, 1 - 1e-9, 2.0**-53, 0.1, 1 / 3])
def test_probabilities_at_the_edges(probability, level):
    eager, ours = generators(11, 0)
    state, mask = ours.get_state(), torch.zeros(50_000, dtype=torch.bool)
    run_kernel("draw_mask", state, len(mask), probability, mask, level=level)
    assert torch.equal(mask, by_comparison(len(mask), probability, eager))


@pytest.mark.parametrize("level", LEVELS)
def test_a_number_whose_high_word_is_the_limits_is_decided_by_its_low_word(level):
    drawn = torch.empty(1000, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3))
    number = int(drawn[700]) & ((1 << 53) - 1)
    for limit in (number - 1, number, number + 1):
        eager, ours = generators(3, 0)
        state, mask = ours.get_state(), torch.zeros(1000, dtype=torch.bool)
        run_kernel("draw_mask", state, 1000, limit / (1 << 53), mask, level=level)
        assert torch.equal(mask, by_comparison(1000, limit / (1 << 53), eager))
        assert bool(mask[700]) == (number < limit)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", SIZES)
def test_a_dropout_and_its_gradient_are_eagers_to_the_bit(count, dtype, level):
    x, grad = (with_special_values(torch.randn(count).to(dtype)) for _ in range(2))
    torch.manual_seed(count)
    state = torch.get_rng_state()
    if not dropout_mask._bernoulli_compares_bits():
        pytest.skip("this PyTorch draws from other numbers")
    expected, mask = aten.native_dropout(x, 0.3, True)
    bits, out = torch.empty((count + 7) // 8, dtype=torch.uint8), torch.empty_like(x)
    scale = float(torch.tensor(1 / 0.7).to(dtype))  # eager rounds it in the forward only
    run_kernel("dropout", state, x, count, 0.7, scale, ELEMENTS[dtype], bits, out, level=level)
    assert torch.equal(unpacked(bits, count), mask)
    assert same_bits(out, expected)
    assert torch.equal(state, torch.get_rng_state())

    run_kernel("apply_dropout", grad, bits, count, 1 / 0.7, ELEMENTS[dtype], out, level=level)
    assert same_bits(out, aten.native_dropout_backward(grad, mask, 1 / 0.7))


@pytest.mark.parametrize("size", [(), (0,), (1,), (3, 5), (700, 33)])
def test_the_operator_draws_as_eager_with_the_library_and_without(size, monkeypatch):
    for native in (dropout_mask._native_draw(), None):
        monkeypatch.setattr(dropout_mask, "_native_draw", lambda native=native: native)
        torch.manual_seed(1)
        expected = torch.empty(size, dtype=torch.bool).bernoulli_(0.9), torch.rand(3)
        torch.manual_seed(1)
        found = dropout_mask.kept(list(size), 0.9, torch.device("cpu")), torch.rand(3)
        assert all(map(torch.equal, found, expected))


def test_the_library_is_used():
    assert dropout_mask._native_draw() or not dropout_mask._bernoulli_compares_bits()


def test_draws_that_differ_from_eagers_are_noticed():
    def wrong(generator, probability, mask):
        torch.empty(len(mask), dtype=torch.int64).random_(generator=generator)
        mask.fill_(True)

    assert not dropout_mask._draws_as_bernoulli(wrong)


def test_functional_dropout_draws_the_same_mask():
    torch.manual_seed(2)
    state = torch.get_rng_state()
    expected = functional.dropout(torch.ones(5001), 0.1)
    mask = torch.empty(5001, dtype=torch.bool)
    run_kernel("draw_mask", state, 5001, 0.9, mask)
    if dropout_mask._bernoulli_compares_bits():
        assert torch.equal(mask, expected != 0)
