"""Packing: rows hold whole sequences, few rows are needed, and every process has its share of every epoch."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening

from ort_accel import OrtAccelError
from ort_accel.data import PackedDataset, PackingBatchSampler, PackingCollator, pack_best_fit

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)
MOST = 20


def examples(*lengths, **more):
    return [{"input_ids": list(range(10 * at + 1, 10 * at + 1 + n)), **more} for at, n in enumerate(lengths, 1)]


def filled(rows, lengths):
    return [sum(lengths[number] for number in row) for row in rows]


@given(LENGTHS)
def test_each_sequence_is_in_one_row_and_no_row_is_too_long(lengths):
    rows = pack_best_fit(lengths, MOST)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert max(filled(rows, lengths)) <= MOST
    least = sorted(filled(rows, lengths))[:2]
    assert len(rows) == 1 or sum(least) > MOST  # no two rows fit into one


def test_the_fullest_row_with_room_is_taken():
    assert pack_best_fit([12, 15, 4, 5, 3, 1], 20) == [[1, 3], [0, 2, 4, 5]]


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 3))
@example([5, 6, 8], 0)  # best-fit needs 4 rows for 3 times these
def test_the_collator_makes_no_more_rows_than_the_sampler(lengths, seed):
    samples, collator = examples(*lengths), PackingCollator(MOST)
    for batch in PackingBatchSampler(lengths, MOST, rows_per_batch=3, seed=seed):
        made = collator([samples[number] for number in batch])
        assert len(made["input_ids"]) <= 3
        assert int((made["position_ids"] == 0).sum()) >= len(batch)


def test_a_sample_that_fits_no_row_is_named():
    with pytest.raises(OrtAccelError, match=r"sample 1 has 21 tokens.*at most 20"):
        pack_best_fit([3, 21], MOST)
    with pytest.raises(OrtAccelError, match=r"sample 7 has 21 tokens.*at most 20"):
        PackingBatchSampler([5] * 7 + [21] + [5] * 12, MOST, rows_per_batch=2)


def epoch_of(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_processes_share_an_epoch(lengths, world, rows_per_batch, drop_last):
    samplers = [
        PackingBatchSampler(lengths, MOST, rows_per_batch, drop_last=drop_last, world_size=world, rank=rank)
        for rank in range(world)
    ]
    made = [epoch_of(sampler, 1) for sampler in samplers]
    assert {len(batches) for batches in made} == {len(samplers[0])}
    seen = [number for batches in made for batch in batches for number in batch]
    if drop_last:
        assert len(seen) == len(set(seen))
    else:
        assert set(seen) == set(range(len(lengths)))
    assert made == [epoch_of(sampler, 1) for sampler in samplers]


def test_epochs_and_seeds_differ_and_repeat():
    lengths = [3, 7, 5, 5, 3, 9, 2, 5] * 4
    first, again, other = (PackingBatchSampler(lengths, MOST, seed=seed) for seed in (0, 0, 1))
    assert epoch_of(first, 0) == epoch_of(again, 0)
    assert epoch_of(first, 1) == epoch_of(again, 1)
    assert epoch_of(first, 0) != epoch_of(first, 1)
    assert epoch_of(other, 0) != epoch_of(again, 0)


def test_an_epoch_is_resumed_where_it_stopped():
    lengths = [3, 7, 5, 5, 3, 9, 2, 5] * 4
    whole = epoch_of(PackingBatchSampler(lengths, MOST), 2)
    stopped = PackingBatchSampler(lengths, MOST)
    stopped.set_epoch(2)
    batches = iter(stopped)
    done = [next(batches) for _ in range(3)]
    resumed = PackingBatchSampler(lengths, MOST)
    resumed.load_state_dict(stopped.state_dict())
    assert done + list(resumed) == whole
    with pytest.raises(OrtAccelError, match="max_length was 20 and is 30"):
        PackingBatchSampler(lengths, 30).load_state_dict(stopped.state_dict())


@pytest.mark.parametrize("with_labels", [True, False])
def test_one_row_is_that_of_transformers(with_labels):
    data = examples(4, 1, 6)
    if with_labels:
        data = [{**one, "labels": [-100, *one["input_ids"][1:]]} for one in data]
    ours = PackingCollator(return_flash_attn_kwargs=True)(data)
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(data)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)), name


def test_rows_are_padded_at_their_end():
    batch = PackingCollator(max_length=8, pad_token_id=9, pad_to_multiple_of=4)(examples(5, 2, 2, 3))
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14, 15, 41, 42, 43], [21, 22, 31, 32, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 12, 13, 14, 15, -100, 42, 43], [-100, 22, -100, 32, *[-100] * 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 0, 0, 0, 0]]


@given(LENGTHS)
def test_a_packed_dataset_holds_its_dataset(lengths):
    data = [
        {"input_ids": torch.full((n,), at), "labels": [at] * n, "attention_mask": [1] * n}
        for at, n in enumerate(lengths)
    ]
    packed = PackedDataset(data, MOST)
    assert packed.tokens == sum(lengths)
    seen = [pair for row in packed for pair in zip(row["input_ids"], row["position_ids"], row["labels"], strict=True)]
    assert sorted(pair[:2] for pair in seen) == sorted(
        (at, place) for at, n in enumerate(lengths) for place in range(n)
    )
    assert all(label == (at if place else -100) for at, place, label in seen)
    rows = [packed[index] for index in range(len(packed))]
    assert PackingCollator()(rows)["input_ids"].shape == (1, sum(lengths))


@pytest.mark.parametrize(
    "more", [{"labels": 1}, {"labels": [1]}, {"attention_mask": [1, 1, 0]}], ids=["class", "too few", "padding"]
)
def test_examples_that_cannot_be_packed_are_refused(more):
    with pytest.raises(OrtAccelError, match="to be packed"):
        PackingCollator()(examples(3, **more))
