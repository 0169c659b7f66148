"""The model of ONNX Runtime's arena: best fit, merged neighbours, and shrinking."""

import pytest

from ort_accel.recompute.ort_arena_model import TABLE_BYTES_PER_UNIT, UNIT_BYTES, Arena

KIB = 1024


@pytest.fixture
def arena():
    return Arena()


def held(*sizes):
    return sum(size + size // UNIT_BYTES * TABLE_BYTES_PER_UNIT for size in sizes)


def test_a_freed_chunk_is_reused(arena):
    arena.allocate("a", 8 * KIB)
    arena.free("a")
    arena.allocate("b", 8 * KIB)
    assert arena.held_bytes == held(8 * KIB)


def test_sizes_are_rounded_up(arena):
    arena.allocate("a", 1)
    arena.allocate("b", UNIT_BYTES + 1)
    assert arena.held_bytes == held(UNIT_BYTES, 2 * UNIT_BYTES)


def test_a_chunk_is_split_if_half_of_it_would_stay_unused(arena):
    arena.allocate("whole", 8 * KIB)
    arena.free("whole")
    arena.allocate("more than half", 5 * KIB)
    arena.allocate("rest", 1 * KIB)
    assert arena.held_bytes == held(8 * KIB, 1 * KIB)
    arena.free("more than half")
    arena.allocate("half", 4 * KIB)
    arena.allocate("other half", 4 * KIB)
    assert arena.held_bytes == held(8 * KIB, 1 * KIB)


def test_the_smallest_chunk_that_fits_is_allocated(arena):
    for name, size in (("large", 6 * KIB), ("small", 4 * KIB)):
        arena.allocate(name, size)
    arena.free("large")
    arena.free("small")
    arena.allocate("a", 4 * KIB)
    arena.allocate("b", 6 * KIB)
    assert arena.held_bytes == held(6 * KIB, 4 * KIB)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_free_neighbours_are_merged(arena, order):
    arena.allocate("whole", 8 * KIB)
    arena.free("whole")
    arena.allocate("a", 4 * KIB)
    arena.allocate("b", 4 * KIB)
    for name in order:
        arena.free(name)
    arena.allocate("whole", 8 * KIB)
    assert arena.held_bytes == held(8 * KIB)


def test_a_live_chunk_keeps_its_region_from_being_reused_as_a_whole(arena):
    arena.allocate("large", 8 * KIB)
    arena.free("large")
    arena.allocate("lasting", 1 * KIB)
    arena.allocate("large", 8 * KIB)
    assert arena.held_bytes == held(8 * KIB, 8 * KIB)


def test_a_value_computed_in_place_allocates_nothing(arena):
    arena.allocate("a", 8 * KIB)
    arena.transfer("a", to="b")
    arena.free("b")
    arena.allocate("c", 8 * KIB)
    assert arena.held_bytes == held(8 * KIB)


def test_shrinking_returns_only_regions_that_are_free_as_a_whole(arena):
    for name in ("free", "partly"):
        arena.allocate(name, 8 * KIB)
    arena.free("partly")
    arena.allocate("part", 2 * KIB)
    arena.free("free")
    arena.shrink()
    assert arena.held_bytes == held(8 * KIB)
    arena.allocate("rest", 6 * KIB)
    assert arena.held_bytes == held(8 * KIB)
