"""The sequences of a row are found by the pairs that its attention allows, and never split where a pair crosses."""

from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_accel.row_skipping.packed_sequences import parts_of

LENGTHS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=3)


def numbers_of(rows):
    """The sequence of each token, counted from 0 in each row; -1 - position for padding."""
    longest = max(map(sum, rows))
    found = [[at for at, length in enumerate(row) for _ in range(length)] for row in rows]
    return torch.tensor([row + [-1 - place for place in range(len(row), longest)] for row in found])


def allowed_by(numbers, within):
    """Pairs of one sequence; `within` says which of these, by the distance of query and key."""
    distance = torch.arange(numbers.shape[1])[:, None] - torch.arange(numbers.shape[1])
    return (numbers[:, :, None] == numbers[:, None, :]) & within(distance)


MASKS = {
    "full": lambda distance: distance == distance,
    "causal": lambda distance: distance >= 0,
    "window": lambda distance: (distance >= 0) & (distance < 3),
    "window on both sides": lambda distance: distance.abs() < 2,
}


def edges_of(parts):
    """The first row and the first token of each part, and the token after its last."""
    return [(part.rows.start or 0, part.tokens.start or 0, part.tokens.stop) for part in parts]


@settings(deadline=None)
@given(LENGTHS, st.sampled_from(sorted(MASKS)))
def test_rows_are_divided_into_their_sequences(rows, name):
    numbers = numbers_of(rows)
    allowed = allowed_by(numbers, MASKS[name])
    parts = parts_of(allowed, len(rows))
    rebuilt = torch.zeros_like(allowed)
    for part in parts:
        rebuilt[part.rows, part.tokens, part.tokens] |= part.allowed
    assert torch.equal(rebuilt, allowed)
    found = set(edges_of(parts))
    if len(parts) > 1:
        assert edges_of(parts) == sorted(found)
        for number, row in enumerate(rows):
            ends = list(accumulate(row))
            longer = {(number, end - length, end) for length, end in zip(row, ends, strict=True) if length > 1}
            assert longer <= found


@settings(deadline=None)
@given(st.lists(st.integers(2, 5), min_size=2, max_size=4), st.data())
def test_a_single_pair_that_crosses_keeps_a_row_whole(row, data):
    allowed = allowed_by(numbers_of([row]), MASKS["causal"])
    query = data.draw(st.integers(row[0], sum(row) - 1))
    allowed[0, query, data.draw(st.integers(0, row[0] - 1))] = True
    inside = sum(int(part.allowed.count_nonzero()) for part in parts_of(allowed, 1))
    assert inside == int(allowed.count_nonzero())


def test_padding_at_the_end_of_a_row_is_one_part():
    allowed = allowed_by(numbers_of([[3, 2], [9]]), MASKS["causal"])
    assert edges_of(parts_of(allowed, 2)) == [(0, 0, 3), (0, 3, 5), (0, 5, 9), (1, 0, 9)]


def test_one_mask_for_all_rows_divides_all():
    parts = parts_of(allowed_by(numbers_of([[2, 2]]), MASKS["full"]), 3)
    assert edges_of(parts) == [(row, *tokens) for row in range(3) for tokens in ((0, 2), (2, 4))]


def test_a_mask_of_padding_or_for_other_keys_is_one_part():
    for shape in ((3, 4, 6), (3, 1, 4), (1, 4, 4)):
        allowed = torch.ones(shape, dtype=torch.bool)
        assert [part.allowed for part in parts_of(allowed, 3)] == [allowed]
