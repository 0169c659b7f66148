"""Packing of tokenized sequences into rows without padding: best-fit, a dataset, a batch sampler and a collator.

A row holds whole sequences. `position_ids` restart with each, and no `attention_mask` is made, since models of
transformers find the sequences of a row by its positions where there is no mask.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from ort_accel.data.epoch_progress import ResumableSampler
from ort_accel.data.sampler import SizedDataset
from ort_accel.errors import OrtAccelError

Example = Mapping[str, Any]
"""A tokenized sequence: `input_ids`, and `labels` where they differ. In a row of several, `position_ids` restart."""

IGNORED = -100
"""The label of tokens without a loss."""


def check_lengths(lengths: Sequence[int], max_length: int) -> None:
    """Raise an error that names the first sequence which is longer than a row."""
    for number, length in enumerate(lengths):
        if length > max_length:
            raise OrtAccelError(
                f"sample {number} has {length} tokens, and a packed row has at most {max_length}; truncate the sample, "
                "or raise max_length"
            )


def pack_best_fit(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Returns rows of sequences, by their numbers, with at most `max_length` tokens in a row.

    The longest sequence goes first, and each into the row that it leaves the least room in.
    """
    check_lengths(lengths, max_length)
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    """The rows that have so many tokens left, the last opened first."""
    rooms: list[int] = []
    """The keys of `with_room`, sorted."""
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        place = bisect_left(rooms, length)
        room = rooms[place] if place < len(rooms) else max_length
        if place < len(rooms):
            row = with_room[room].pop()
            if not with_room[room]:
                rooms.pop(place)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(number)
        left = room - length
        if not with_room[left]:
            insort(rooms, left)
        with_room[left].append(row)
    return rows


def _pack_in_order(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Returns rows of consecutive sequences, as few as possible, each with at most `max_length` tokens."""
    rows: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if length > room:
            rows.append([])
            room = max_length
        rows[-1].append(number)
        room -= length
    return rows


class PackedDataset(Dataset[dict[str, list[int]]]):
    """The rows of a dataset, packed best-fit; the same rows in every epoch. Every sampler and loader can be used on it.

    A row is an example with `input_ids`, `labels` and `position_ids` for `PackingCollator`.
    """

    def __init__(self, dataset: SizedDataset, max_length: int, lengths: Sequence[int] | None = None) -> None:
        """`lengths` are the tokens of each sample; by default, the samples are read and counted."""
        lengths = [len(dataset[index]["input_ids"]) for index in range(len(dataset))] if lengths is None else lengths
        self.dataset, self.tokens = dataset, sum(lengths)
        self.rows = pack_best_fit(lengths, max_length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return joined([self.dataset[number] for number in self.rows[index]])


class PackingBatchSampler(ResumableSampler[list[int]]):
    """Batches of the samples that fill `rows_per_batch` packed rows, with as many batches on every process.

    `PackingCollator` with the same `max_length` makes the rows of a batch. The order depends on `seed` and epoch only,
    so that processes need not communicate. Call `set_epoch` before each epoch.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_length: int,
        rows_per_batch: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        world_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        """`world_size` and `rank` are those of torch.distributed by default, or one process without it.

        The last batches repeat rows where rows do not fill a batch of every process; `drop_last` leaves them out.
        """
        super().__init__()
        is_distributed = dist.is_available() and dist.is_initialized()
        self.world_size = world_size or (dist.get_world_size() if is_distributed else 1)
        self.rank = rank if rank is not None else (dist.get_rank() if is_distributed else 0)
        if rows_per_batch < 1 or not 0 <= self.rank < self.world_size:
            raise OrtAccelError(
                f"rows_per_batch is {rows_per_batch} and rank is {self.rank} of {self.world_size} processes; a batch "
                "has at least one row, and ranks count from 0"
            )
        self.lengths, self.max_length, self.rows_per_batch = list(lengths), max_length, rows_per_batch
        check_lengths(self.lengths, max_length)
        self.seed, self.drop_last = seed, drop_last
        self._rows: tuple[int, list[list[int]]] | None = None

    def identity(self) -> dict[str, object]:
        names = ("max_length", "rows_per_batch", "seed", "drop_last", "world_size")
        return {"samples": len(self.lengths), **{name: getattr(self, name) for name in names}}

    def _items(self) -> list[list[int]]:
        rows, size = self._rows_of_epoch(), self.rows_per_batch
        step = size * self.world_size
        count = len(rows) // step if self.drop_last else -(-len(rows) // step)
        starts = range(self.rank * size, count * step, step)
        return [[number for at in range(start, start + size) for number in rows[at % len(rows)]] for start in starts]

    def _rows_of_epoch(self) -> list[list[int]]:
        """Returns the rows of all processes. Sequences of equal length change rows from epoch to epoch."""
        epoch = self._progress.epoch
        if self._rows is None or self._rows[0] != epoch:
            shuffle = random.Random(f"{self.seed}/{epoch}").shuffle
            order = list(range(len(self.lengths)))
            shuffle(order)
            rows = pack_best_fit([self.lengths[number] for number in order], self.max_length)
            shuffle(rows)
            self._rows = epoch, [[order[place] for place in row] for row in rows]
        return self._rows[1]


@dataclass(frozen=True)
class PackingCollator:
    """Makes a batch of packed rows from tokenized examples, or from rows of a `PackedDataset`, for causal LMs.

    Without `max_length` a batch is one row, with every example in the order given. With it, examples are packed
    best-fit into rows of at most so many tokens, or in the order given if that takes fewer rows, as it may with the
    rows of a `PackingBatchSampler`. Shorter rows are padded at their end; a padded token is a sequence of its own,
    without a label. Labels are `input_ids` where an example has none. The first label of each sequence is
    ignored, as the token before it belongs to another one.
    """

    max_length: int | None = None
    pad_token_id: int = 0
    pad_to_multiple_of: int = 1
    """Lengthen rows to a multiple of this number, so that there are fewer sizes."""
    return_flash_attn_kwargs: bool = False
    """Return the boundaries of the sequences for variable-length kernels as well: `cu_seq_lens_q`, `cu_seq_lens_k`,
    `max_length_q` and `max_length_k`."""

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Returns `input_ids`, `labels` and `position_ids`, each [rows, tokens]."""
        if self.max_length is None:
            rows = [joined(examples)]
        else:
            lengths = [len(example["input_ids"]) for example in examples]
            packings = pack_best_fit(lengths, self.max_length), _pack_in_order(lengths, self.max_length)
            rows = [joined([examples[number] for number in row]) for row in min(packings, key=len)]
        longest = max(len(row["input_ids"]) for row in rows)
        length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        fills = {"input_ids": self.pad_token_id, "labels": IGNORED, "position_ids": 0}
        batch: dict[str, Any] = {
            name: torch.tensor([row[name] + [fill] * (length - len(row[name])) for row in rows], dtype=torch.long)
            for name, fill in fills.items()
        }
        return batch | (_boundaries(batch["position_ids"]) if self.return_flash_attn_kwargs else {})


def joined(examples: Sequence[Example]) -> dict[str, list[int]]:
    """Returns examples as one row, one after the other."""
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    for example in examples:
        tokens = _listed(example["input_ids"])
        positions = _listed(example.get("position_ids", range(len(tokens))))
        labels = _listed(example.get("labels", tokens))
        if len(labels) != len(tokens) or not all(_listed(example.get("attention_mask", ()))):
            raise OrtAccelError(
                f"an example with {len(tokens)} tokens has {len(labels)} labels, or an attention_mask that hides "
                "tokens; to be packed, examples have no padding, and one label a token"
            )
        row["input_ids"] += tokens
        row["labels"] += [label if place else IGNORED for label, place in zip(labels, positions, strict=True)]
        row["position_ids"] += positions
    return row


def _listed(values: Any) -> list[int]:
    if not hasattr(values, "__len__"):
        raise OrtAccelError(f"{values!r} is no list of tokens; to be packed, an example has one label a token")
    found = values.tolist() if isinstance(values, Tensor) else list(values)
    return found if isinstance(found, list) else [found]


def _boundaries(positions: Tensor) -> dict[str, Any]:
    """Returns the arguments of variable-length kernels, with the rows of a batch one after the other."""
    starts = (positions.flatten() == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], positions.numel()]
    longest = max(end - start for start, end in zip(starts, ends, strict=True))
    cumulative = torch.tensor([*starts, positions.numel()], dtype=torch.int32)
    names = {"cu_seq_lens": cumulative, "max_length": longest}
    return {f"{name}_{side}": value for name, value in names.items() for side in "qk"}
