"""What other batches would compute is counted right, and only what is possible is promised."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ort_accel.observe.batching import NEEDED, SeenBatch, Work, _bins, schemes, waiting

TOKENS = Work((1.0,), (0.0,))


def batch(width, *lengths, labels=0):
    return SeenBatch((width,), tuple((length,) for length in lengths), labels)


def computed(batches, work=TOKENS):
    return {scheme.name: scheme.flops for scheme in schemes(batches, work)}


def test_each_way_computes_what_its_rows_hold():
    found = computed([batch(10, 1, 8), batch(10, 2, 7)])
    assert list(found.values()) == [
        40,  # four rows of ten
        2 * 8 + 2 * 7,
        2 * 8 + 2 * 2,  # 8 with 7, 2 with 1
        2 * 10,  # 8 with 2, 7 with 1
        18,
    ]
    assert "packed into 10 tokens" in list(found)[3]


def test_attention_counts_pairs_and_the_head_counts_labels():
    work = Work((0.0,), (1.0,), label=100.0)
    found = computed([batch(4, 3, 1, labels=2)], work)
    assert found["dense, in the batches as they came"] == 2 * 16 + 100 * 8
    assert found[NEEDED] == 9 + 1 + 100 * 2


def test_an_encoder_and_a_decoder_have_lengths_of_their_own_and_are_not_packed():
    work = Work((1.0, 10.0), (0.0, 0.0), cross=1000.0)
    found = computed([SeenBatch((4, 3), ((2, 3), (4, 1)), 0)], work)
    assert not any("packing" in name for name in found)
    assert found["dense, in the batches as they came"] == 2 * (4 + 30 + 12_000)
    assert found[NEEDED] == (2 + 30 + 6_000) + (4 + 10 + 4_000)


@pytest.mark.parametrize(
    ("lengths", "rows"), [([5, 5, 5], 2), ([10] * 3, 3), ([6, 5, 4, 3, 2], 2), ([], 0), ([0, 0], 1)]
)
def test_packing_fills_rows(lengths, rows):
    assert _bins(lengths, 10) == rows


a_batch = st.lists(st.integers(1, 64), min_size=4, max_size=4).map(lambda lengths: batch(64, *lengths))
some_batches = st.lists(a_batch, min_size=1, max_size=20)


@given(some_batches)
def test_better_batches_never_compute_more_and_none_less_than_what_counts(batches):
    work = Work((3.0,), (0.1,))
    dense, longest, grouped, packed, needed = (scheme.flops for scheme in schemes(batches, work))
    assert dense >= longest >= grouped - 1e-6
    assert grouped >= needed - 1e-6
    assert packed >= sum(length for one in batches for (length,) in one.rows) * 3.0


@given(some_batches, st.integers(2, 4))
def test_a_share_of_waiting_is_a_share(batches, processes):
    found = waiting(batches, processes)
    if found is None:
        assert len(batches) // processes < 2
    else:
        assert all(0 <= share < 1 for share in found)


def test_balancing_takes_most_of_the_waiting_away():
    lengths = itertools.cycle([1, 40, 7, 60, 3, 22, 9, 51, 30, 5])
    batches = [batch(64, *itertools.islice(lengths, 4)) for _ in range(40)]
    before, after = waiting(batches, 2)
    assert before > 0.05
    assert after < before / 4


def test_too_few_rows_tell_nothing_about_balancing():
    assert waiting([batch(4, 1, 2)], 2) is None
    assert waiting([], 2) is None
