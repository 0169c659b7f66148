"""Reading and writing at named places equals eager, with repeated and negative indices; a bad index is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.lowering.through_ort import Lowered, assert_like_eager

TABLE = torch.arange(9 * 7, dtype=torch.float32).view(9, 7).sin()
CUBE = torch.arange(5 * 6 * 7, dtype=torch.float32).view(5, 6, 7).cos()
REPEATED = torch.tensor([3, 0, 3, 3, 4])
FROM_THE_END = torch.tensor([-1, 0, -5, 3, -1])
PAIRS = torch.tensor([[1, 0], [1, 4], [2, 2]])
BAD_INDEX = r"(?i)out of|bounds|indice"

READS: dict[str, Callable[..., Any]] = {
    "embedding": lambda table, cube, i: functional.embedding(i, table, padding_idx=3),
    "embedding of a table": lambda table, cube, i: functional.embedding(i.view(5, 1), table),
    "index_select": lambda table, cube, i: (cube.index_select(0, i), cube.index_select(-1, i)),
    "gather along the last": lambda table, cube, i: table.gather(1, i.expand(4, 5)),
    "gather of less": lambda table, cube, i: cube.gather(0, i.view(5, 1, 1).expand(5, 2, 3)),
}
WRAPPING_READS: dict[str, Callable[..., Any]] = {
    "first": lambda table, cube, i: cube[i],
    "middle": lambda table, cube, i: cube[:, i],
    "last": lambda table, cube, i: cube[..., i.view(5, 1)],
    "two neighbours": lambda table, cube, i: cube[:, i, i],
    "two apart": lambda table, cube, i: cube[i, :, i],
    "broadcast": lambda table, cube, i: cube[i.view(5, 1), i],
    "broadcast in the middle": lambda table, cube, i: cube[:, i.view(5, 1), i],
    "all": lambda table, cube, i: cube[i, i, i],
    "flags": lambda table, cube, i: (cube > 0)[i, i],
    "32 bit": lambda table, cube, i: cube[i.int()],
    "32 bit, two": lambda table, cube, i: cube[i.int(), i.int()],
    "take": lambda table, cube, i: torch.take(cube, i.view(5, 1)),
}


@pytest.mark.parametrize("name", [*READS, *WRAPPING_READS])
def test_repeated_places_are_read(name):
    assert_like_eager((READS | WRAPPING_READS)[name], TABLE, CUBE, REPEATED)


@pytest.mark.parametrize("name", WRAPPING_READS)
def test_places_counted_from_the_end_are_read(name):
    assert_like_eager(WRAPPING_READS[name], TABLE, CUBE, FROM_THE_END)


@pytest.mark.parametrize("name", [*READS, *WRAPPING_READS])
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_a_bad_index_is_an_error_not_a_number(name, bad):
    if name in WRAPPING_READS:
        bad = bad if bad > 0 else -(10**6)
    function = (READS | WRAPPING_READS)[name]
    lowered = Lowered(function, [TABLE, CUBE, REPEATED])
    index = REPEATED.clone()
    index[2] = bad
    with pytest.raises((IndexError, RuntimeError)):
        function(TABLE, CUBE, index)
    with pytest.raises(Exception, match=BAD_INDEX):
        lowered(TABLE, CUBE, index)


def test_an_index_gives_the_shape_that_torch_gives():
    index = torch.zeros(2, 3, dtype=torch.long)
    assert_like_eager(lambda x, i: (x[i], x[:, i], x[i, :, i], x[:, i, i], x[i, i, i]), CUBE, index)


def test_single_numbers_as_indices():
    at = torch.ops.aten.index.Tensor
    assert_like_eager(
        lambda x, i: (at(x, [i]), at(x, [None, i]), at(x, [i, i]), x.index_select(1, i)), CUBE, torch.tensor(2)
    )


def test_no_index_at_all():
    none = torch.zeros(0, dtype=torch.long)
    assert_like_eager(lambda x, i: (x[i], x.index_select(1, i), functional.embedding(i, x[0])), CUBE, none, ort=False)
    assert_like_eager(lambda x, i: x.index_copy(0, i, x[:0]), CUBE, none, ort=False)


aten = torch.ops.aten

WRITES: dict[str, Callable[..., Any]] = {
    "a slice": lambda x: x.slice_scatter(x[:2].exp(), 0, 1, 3),
    "to the end": lambda x: x.slice_scatter(x[:2].exp(), 0, -2),
    "all": lambda x: x.slice_scatter(x.exp()),
    "in the middle": lambda x: x.slice_scatter(x[:, :2].exp(), 1, 2, 4),
    "with steps": lambda x: x.slice_scatter(x[:, :3].exp(), 1, 1, None, 2),
    "a row": lambda x: x.select_scatter(x[1].exp(), 0, 0),
    "the last column": lambda x: x.select_scatter(x[..., 1].exp(), -1, -1),
    "a mask": lambda x: x.index_put((x > 0,), x.sum()),
    "a mask of rows": lambda x: x.index_put((x[:, :, 0] > 0,), x.sum().view(1, 1)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_a_part(name):
    assert_like_eager(WRITES[name], CUBE)


PLACES: dict[str, Callable[..., Any]] = {
    "rows": lambda x, i: x.index_put((i,), x[0].exp()),
    "columns": lambda x, i: aten.index_put(x, [None, i], x.sum()),
    "two neighbours": lambda x, i: aten.index_put(x, [None, i, i], x[:, :1, 0].exp()),
    "two apart": lambda x, i: aten.index_put(x, [i, None, i], x[0, :, 0].exp()),
    "all": lambda x, i: x.index_put((i, i, i), x.sum()),
    "broadcast": lambda x, i: x.index_put((i.view(-1, 1), i), x[0, 0].exp()),
    "filled": lambda x, i: (x.index_fill(0, i, 3.0), x.index_fill(-1, i, 2)),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("index", [REPEATED, FROM_THE_END], ids=["repeated", "from the end"])
def test_writing_at_indices(name, index):
    assert_like_eager(PLACES[name], CUBE, index)


def test_different_values_at_different_indices():
    index = torch.tensor([4, 0, 2])
    assert_like_eager(lambda x, i: aten.index_put(x, [None, i], x[:, :3].exp()), CUBE, index)
    assert_like_eager(lambda x, i: aten.index_put(x, [i, None, i], x[:3, :, 0].exp()), CUBE, index)


@pytest.mark.parametrize("name", PLACES)
def test_writing_at_a_bad_index_is_an_error(name):
    lowered = Lowered(PLACES[name], [CUBE, REPEATED])
    for bad in (-100, 100):
        with pytest.raises(Exception, match=BAD_INDEX):
            lowered(CUBE, torch.tensor([0, bad, 1, 1, 2]))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_keeps_the_last_of_several_values(dim):
    index = torch.tensor([[0, 2, 2], [2, 0, 2], [0, 0, 0]])
    assert_like_eager(
        lambda x, i: (x.scatter(dim, i, x * 2), x.scatter(dim, i, 7.0)), TABLE[:4, :3].contiguous(), index
    )


COPIES: dict[str, Callable[..., Any]] = {
    "rows": lambda x, i: x.index_copy(0, i, x[:3] * 2),
    "in the middle": lambda x, i: x.index_copy(1, i, x[:, :3] * 2),
    "the last": lambda x, i: x.index_copy(-1, i, x[..., :3] * 2),
    "one": lambda x, i: x.index_copy(0, i[0], x[:1] * 2),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_copying_to_places(name, dtype):
    assert_like_eager(COPIES[name], (CUBE * 3).to(dtype), torch.tensor([4, 0, 2]))


@pytest.mark.parametrize("bad", [-1, 100])
def test_copying_to_a_bad_place_is_an_error(bad):
    lowered = Lowered(COPIES["rows"], [CUBE, torch.tensor([4, 0, 2])])
    with pytest.raises(IndexError):
        COPIES["rows"](CUBE, torch.tensor([4, bad, 2]))
    with pytest.raises(Exception, match=BAD_INDEX):
        lowered(CUBE, torch.tensor([4, bad, 2]))


def test_scatter_with_a_negative_index_is_an_error():
    lowered = Lowered(lambda x, i: x.scatter(1, i, 1.0), [TABLE, PAIRS])
    with pytest.raises(Exception, match=BAD_INDEX):
        lowered(TABLE, PAIRS - 2)


def test_what_adds_up_at_repeated_places_is_left_to_pytorch():
    def sums(x: torch.Tensor, i: torch.Tensor) -> Any:
        return (
            x.index_put((i,), x[i], accumulate=True),
            x.index_add(0, i, x[i]),
            x.scatter_add(0, i.view(5, 1).expand(5, 7), x),
            torch.ops.aten.embedding_dense_backward(x[i], i, 9, -1, False),
        )

    lowered = Lowered(sums, [TABLE, REPEATED])
    assert {name.split(".")[1] for name in lowered.refusals} >= {
        "index_put",
        "index_add",
        "scatter_add",
        "embedding_dense_backward",
    }
    torch.testing.assert_close(lowered(TABLE, REPEATED), list(sums(TABLE, REPEATED)))


def test_writes_at_indices_are_left_to_pytorch_where_order_must_be_determined():
    torch.use_deterministic_algorithms(True)
    try:
        lowered = Lowered(PLACES["rows"], [CUBE, REPEATED])
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(lowered.refusals) == {"aten.index_put.default"}


@pytest.mark.parametrize("shift", [0, 1, -1, 3, -8, 12])
def test_roll(shift):
    assert_like_eager(lambda x: (x.roll(shift, 1), x.roll((shift, 1), (0, -1)), x.roll(shift)), CUBE)


def test_flip():
    assert_like_eager(lambda x: (x.flip(0), x.flip(-1, 0), x.flip(())), CUBE)


def test_repeating_and_narrowing():
    assert_like_eager(lambda x: (x.repeat_interleave(3, 1), x.repeat_interleave(2), x.narrow(1, 2, 3)), CUBE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.bool])
def test_other_types(dtype):
    values = (CUBE * 3).to(dtype)
    assert_like_eager(lambda x, i: (x[i, i], x[i], x.index_select(0, i), x.roll(1, 0), x.flip(0)), values, REPEATED)
    assert_like_eager(lambda x, i: (x.index_put((i,), x[0]), x.slice_scatter(x[:1], 0, 2, 3)), values, REPEATED)


def test_sizes_that_change():
    def function(x: torch.Tensor, i: torch.Tensor) -> Any:
        moved = x.roll(1, 1).select_scatter(x[:, 1], 1, 0).slice_scatter(x[:, 1:], 1, 1).index_put((i,), x.sum())
        return moved[i], x[i, i], functional.embedding(i, x[0]), moved.flip(1), x.index_select(1, i)

    lowered = Lowered(function, [CUBE, REPEATED], dynamic=True)
    assert not lowered.refusals
    for x, i in [(CUBE, REPEATED), (CUBE[:4, :5, :3].contiguous(), torch.tensor([1, 1, 0, 2]))]:
        torch.testing.assert_close(lowered(x, i), list(function(x, i)))


def test_numbers_that_are_added_at_a_mask_are_added() -> None:
    number = torch.tensor(0.5)
    assert_like_eager(
        lambda x, mask, number: x.index_put([mask], number, accumulate=True), TABLE, TABLE > 0.2, number, ort=False
    )
