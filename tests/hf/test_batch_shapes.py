"""What is known of batches before the first one, from lists and tables alone."""

import pytest
from datasets import Dataset as Table
from datasets import Image
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorWithPadding, default_data_collator

from ort_accel.data import PackedDataset, PackingCollator
from ort_accel.hf.batch_shapes import shapes_of_batches
from tests.hf.words import tokenizer


def rows(*lengths):
    return [{"input_ids": [5] * length, "attention_mask": [1] * length, "label": 0} for length in lengths]


def loader(samples, collate=None, size=2, **how):
    return DataLoader(samples, batch_size=size, collate_fn=collate or default_data_collator, **how)


@pytest.mark.parametrize("made", [list, tuple, Table.from_list])
def test_samples_of_several_lengths_are_seen_in_lists_and_tables(made):
    assert shapes_of_batches(loader(made(rows(4, 5, 6, 7)))).lengths
    assert not shapes_of_batches(loader(made(rows(4, 4, 4, 4)))).lengths


def test_batches_that_all_hold_a_longest_sample_have_one_length():
    assert not shapes_of_batches(loader(rows(4, 8, 8, 3))).lengths


def test_lengths_are_told_from_how_the_batch_is_padded():
    samples = rows(4, 5, 6, 7)
    assert shapes_of_batches(loader(samples, DataCollatorWithPadding(tokenizer()))).lengths
    assert not shapes_of_batches(loader(samples, DataCollatorWithPadding(tokenizer(), "max_length", 9))).lengths
    assert not shapes_of_batches(loader(samples, DataCollatorWithPadding(tokenizer(), pad_to_multiple_of=8))).lengths


def test_packed_rows_differ_unless_they_are_filled_up():
    samples = PackedDataset(rows(4, 5, 6, 7), 8)
    assert shapes_of_batches(loader(samples, PackingCollator())).lengths
    assert shapes_of_batches(loader(samples, PackingCollator(max_length=8))).lengths
    assert not shapes_of_batches(loader(samples, PackingCollator(max_length=8, pad_to_multiple_of=8))).lengths


def test_a_last_batch_counts_where_it_is_smaller_and_reached():
    assert shapes_of_batches(loader(rows(4, 4, 4))).batch
    assert shapes_of_batches(loader(rows(4, 4, 4)), steps=2).batch
    assert not shapes_of_batches(loader(rows(4, 4, 4)), steps=1).batch
    assert not shapes_of_batches(loader(rows(4, 4, 4), drop_last=True)).batch
    assert not shapes_of_batches(loader(rows(4, 4, 4, 4))).batch


def test_tokens_of_any_name_tell_lengths():
    samples = [{"prompt_ids": [5], "chosen_ids": [5] * length, "text": "a " * length} for length in (4, 5, 6, 7)]
    for made in (samples, Table.from_list(samples), Table.from_list(samples).shuffle(seed=0)):
        assert shapes_of_batches(loader(made)).lengths


def test_a_table_without_sequence_columns_is_not_read():
    table = Table.from_list([{"text": "a " * length} for length in (4, 5, 6, 7)])
    for made in (table, table.select([3, 1, 0]), table.shuffle(seed=0)):
        assert not shapes_of_batches(loader(made)).lengths


def test_samples_that_are_computed_on_access_are_not_read():
    class Made(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise AssertionError("this would draw random numbers")

    class WithNames(Made):
        column_names = ("input_ids",)

    table = Table.from_list(rows(4, 5)).with_transform(lambda _: pytest.fail("this would, too"))
    for samples in (Made(), WithNames(), table, Table.from_list(rows(4, 5)).with_format("pandas")):
        assert not shapes_of_batches(loader(samples)).lengths
    assert shapes_of_batches(loader(iter(rows(4, 5)))) == shapes_of_batches(None)


def test_only_the_sequence_columns_of_a_table_are_read():
    table = Table.from_list([{**row, "image": {"bytes": b"no picture", "path": None}} for row in rows(4, 5, 6, 7)])
    table = table.cast_column("image", Image())
    with pytest.raises((ImportError, OSError)):
        table[:1]
    assert shapes_of_batches(loader(table)).lengths
