"""Symbolic sets of rows, and their unions."""

from __future__ import annotations

from torch import fx

from ort_accel.row_skipping.row_sets import (
    AllRows,
    AttendedKeys,
    Broadcast,
    FixedPosition,
    FromSlice,
    SomeRows,
    ValidLabel,
    broadcast,
    has_attended_keys,
    union,
    unslice,
)

NODE = fx.Graph().placeholder("labels")
LABELS, FIRST, LOOKED_AT = ValidLabel(NODE, -100), FixedPosition(0, 7), AttendedKeys(NODE)


def some(*atoms, dims=(0, 1)):
    return SomeRows(dims, frozenset(atoms))


def test_readers_of_the_same_dimensions_read_the_union() -> None:
    assert union([some(LABELS), some(FIRST)], (3, 7, 5)) == some(LABELS, FIRST)


def test_one_reader_of_all_rows_decides() -> None:
    assert union([some(LABELS), AllRows("a mean"), some(FIRST)], (3, 7)) == AllRows("a mean")


def test_readers_of_other_dimensions_are_broadcast_to_both() -> None:
    met = union([some(LABELS, dims=(0,)), some(FIRST, dims=(1,))], (3, 7, 5))
    assert met == some(Broadcast(LABELS, (0,), (3, 7)), Broadcast(FIRST, (1,), (3, 7)))


def test_attended_keys_are_not_broadcast_to_other_dimensions() -> None:
    assert isinstance(broadcast(some(LOOKED_AT), (0, 1, 2), (3, 7, 5)), AllRows)
    assert isinstance(unslice(some(LOOKED_AT), 1, 1, (3, 6), (3, 7)), AllRows)
    assert broadcast(some(LOOKED_AT), (0, 1), (3, 7)) == some(LOOKED_AT)


def test_rows_of_a_slice_are_rows_of_the_whole() -> None:
    assert unslice(some(LABELS), 1, 1, (3, 6), (3, 7)) == some(FromSlice(LABELS, 1, 1, (3, 6), (3, 7)))


def test_attended_keys_are_found_among_atoms() -> None:
    assert has_attended_keys([FIRST, LOOKED_AT])
    assert not has_attended_keys([FIRST, LABELS])
