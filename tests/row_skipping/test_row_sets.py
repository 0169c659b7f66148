"""Sets of rows, named by where they come from, and how they meet."""

from __future__ import annotations

from torch import fx

from ort_accel.row_skipping.row_sets import (
    Everything,
    Keys,
    Labelled,
    Lifted,
    Place,
    Shifted,
    Some,
    has_keys,
    join,
    lift,
    shift,
)

NODE = fx.Graph().placeholder("labels")
LABELS, FIRST, LOOKED_AT = Labelled(NODE, -100), Place(0, 7), Keys(NODE)


def some(*atoms, dims=(0, 1)):
    return Some(dims, frozenset(atoms))


def test_readers_of_the_same_dimensions_read_the_union() -> None:
    assert join([some(LABELS), some(FIRST)], (3, 7, 5)) == some(LABELS, FIRST)


def test_one_that_reads_everything_decides() -> None:
    assert join([some(LABELS), Everything("a mean"), some(FIRST)], (3, 7)) == Everything("a mean")


def test_readers_of_other_dimensions_meet_in_those_of_both() -> None:
    met = join([some(LABELS, dims=(0,)), some(FIRST, dims=(1,))], (3, 7, 5))
    assert met == some(Lifted(LABELS, (0,), (3, 7)), Lifted(FIRST, (1,), (3, 7)))


def test_rows_that_attention_looks_at_have_no_other_dimensions() -> None:
    assert isinstance(lift(some(LOOKED_AT), (0, 1, 2), (3, 7, 5)), Everything)
    assert isinstance(shift(some(LOOKED_AT), 1, 1, (3, 6), (3, 7)), Everything)
    assert lift(some(LOOKED_AT), (0, 1), (3, 7)) == some(LOOKED_AT)


def test_rows_of_a_slice_are_rows_of_the_whole() -> None:
    assert shift(some(LABELS), 1, 1, (3, 6), (3, 7)) == some(Shifted(LABELS, 1, 1, (3, 6), (3, 7)))


def test_it_is_known_whether_attention_decides() -> None:
    assert has_keys([FIRST, LOOKED_AT])
    assert not has_keys([FIRST, LABELS])
