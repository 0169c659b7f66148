"""ONNX Runtime's pool: the smallest piece that fits is handed out, neighbours join, and nothing is given back."""

import pytest

from ort_accel.recompute.ort_arena_model import TABLE, UNIT, Arena

KIB = 1024


@pytest.fixture
def arena():
    return Arena()


def held(*sizes):
    return sum(size + size // UNIT * TABLE for size in sizes)


def test_what_is_given_back_is_kept_and_used_again(arena):
    arena.take("a", 8 * KIB)
    arena.give("a")
    arena.take("b", 8 * KIB)
    assert arena.held == held(8 * KIB)


def test_sizes_are_rounded_up(arena):
    arena.take("a", 1)
    arena.take("b", UNIT + 1)
    assert arena.held == held(UNIT, 2 * UNIT)


def test_a_piece_is_cut_where_half_of_it_would_be_left_and_not_before(arena):
    arena.take("whole", 8 * KIB)
    arena.give("whole")
    arena.take("more than half", 5 * KIB)
    arena.take("rest", 1 * KIB)
    assert arena.held == held(8 * KIB, 1 * KIB)
    arena.give("more than half")
    arena.take("half", 4 * KIB)
    arena.take("other half", 4 * KIB)
    assert arena.held == held(8 * KIB, 1 * KIB)


def test_the_smallest_piece_that_fits_is_taken(arena):
    for name, size in (("large", 6 * KIB), ("small", 4 * KIB)):
        arena.take(name, size)
    arena.give("large")
    arena.give("small")
    arena.take("a", 4 * KIB)
    arena.take("b", 6 * KIB)
    assert arena.held == held(6 * KIB, 4 * KIB)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_free_neighbours_join_again(arena, order):
    arena.take("whole", 8 * KIB)
    arena.give("whole")
    arena.take("a", 4 * KIB)
    arena.take("b", 4 * KIB)
    for name in order:
        arena.give(name)
    arena.take("whole", 8 * KIB)
    assert arena.held == held(8 * KIB)


def test_what_lasts_keeps_a_large_piece_from_being_used_again(arena):
    arena.take("large", 8 * KIB)
    arena.give("large")
    arena.take("lasting", 1 * KIB)
    arena.take("large", 8 * KIB)
    assert arena.held == held(8 * KIB, 8 * KIB)


def test_a_value_computed_in_place_of_another_takes_nothing(arena):
    arena.take("a", 8 * KIB)
    arena.hand_on("a", to="b")
    arena.give("b")
    arena.take("c", 8 * KIB)
    assert arena.held == held(8 * KIB)


def test_only_what_is_free_as_a_whole_goes_back(arena):
    for name in ("free", "partly"):
        arena.take(name, 8 * KIB)
    arena.give("partly")
    arena.take("part", 2 * KIB)
    arena.give("free")
    arena.shrink()
    assert arena.held == held(8 * KIB)
    arena.take("rest", 6 * KIB)
    assert arena.held == held(8 * KIB)
