"""The sequences of a row are found by the pairs that its attention allows, and never split where a pair crosses."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_accel.row_skipping.packed_sequences import packed_sequences

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


@settings(deadline=None)
@given(LENGTHS, st.sampled_from(sorted(MASKS)))
def test_rows_are_split_into_their_sequences(rows, name):
    numbers = numbers_of(rows)
    real = numbers >= 0
    found = packed_sequences(allowed_by(numbers, MASKS[name]), real, real)
    if max(map(len, rows)) == 1:
        assert found is None
        return
    assert (found.diff(dim=1) >= 0).all()
    for at in range(len(rows)):
        of_row = found[at][real[at]]
        assert torch.equal(of_row - of_row[0], numbers[at][real[at]])
    starts = [int(row[0]) for row in found]
    assert starts == sorted(set(starts))  # no sequence goes on in the next row


@settings(deadline=None)
@given(st.lists(st.integers(2, 5), min_size=2, max_size=4), st.data())
def test_a_single_pair_that_crosses_keeps_a_row_whole(row, data):
    numbers = numbers_of([row])
    allowed = allowed_by(numbers, MASKS["causal"])
    query = data.draw(st.integers(row[0] + 1, sum(row) - 1))
    first = int((numbers[0] == numbers[0, query]).nonzero()[0])
    key = data.draw(st.integers(0, first - 1)) if first else 0
    allowed[0, query, key] = True
    everything = torch.ones_like(numbers, dtype=torch.bool)
    found = packed_sequences(allowed, everything, everything)
    assert found is None or found[0, query] == found[0, key]


def test_a_pair_that_nobody_reads_crosses_nothing():
    numbers = numbers_of([[3, 3]])
    allowed = allowed_by(numbers, MASKS["causal"])
    allowed[0, 4, 0] = True
    queries = torch.tensor([[True, True, True, True, False, True]])
    assert packed_sequences(allowed, queries, torch.ones_like(queries)).tolist() == [[0, 0, 0, 1, 1, 1]]


def test_tokens_that_are_not_read_lie_between_sequences():
    numbers = numbers_of([[2, 3, 2]])
    read = torch.tensor([[True, True, False, False, False, True, True]])
    found = packed_sequences(allowed_by(numbers, MASKS["causal"]), read, read)
    assert found[0][read[0]].tolist() == [0, 0, 1, 1]


def test_one_mask_for_all_rows_splits_all():
    numbers = numbers_of([[2, 2]])
    read = torch.ones(3, 4, dtype=torch.bool)
    found = packed_sequences(allowed_by(numbers, MASKS["full"]), read, read)
    assert found.tolist() == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]


def test_keys_of_other_tokens_are_not_split():
    allowed = torch.ones(1, 4, 6, dtype=torch.bool)
    assert packed_sequences(allowed, torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 6, dtype=torch.bool)) is None
    of_all_queries = torch.ones(1, 1, 4, dtype=torch.bool)
    assert packed_sequences(of_all_queries, *[torch.ones(1, 4, dtype=torch.bool)] * 2) is None
