"""Sums at repeated rows: eager's, whatever the index is, and the gradient of chosen rows through the engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ort_accel.kernels import index_add
from tests.against_eager import BETWEEN_SESSIONS, assert_step_as_eager, pair

aten = torch.ops.aten

INDICES = {
    "repeated": torch.tensor([2, 0, 2, 2, 4]),
    "from the end": torch.tensor([-1, 4, -5, 0, 0]),
    "32 bits": torch.tensor([2, 0, 2, 2, 4], dtype=torch.int32),
    "of two dimensions": torch.tensor([[1, 1], [3, -4]]),
    "none": torch.zeros(0, dtype=torch.long),
}


@pytest.fixture
def adds(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The indices that were found to list rows, and None for others."""
    found: list[Tensor] = []
    rows = index_add._row_index
    monkeypatch.setattr(index_add, "_row_index", lambda *args: found.append(rows(*args)) or found[-1])
    return found


@pytest.mark.parametrize("shape", [(5,), (5, 7), (5, 2, 3)])
@pytest.mark.parametrize("name", INDICES)
def test_sums_are_eagers(adds: list[Tensor], name: str, shape: tuple[int, ...]) -> None:
    index, base = INDICES[name], torch.randn(shape)
    values = torch.randn(*index.shape, *shape[1:])
    kept = base.clone()
    found = index_add.index_put(base, [index], values, True)
    torch.testing.assert_close(found, aten.index_put(base, [index], values, True))
    assert torch.equal(base, kept)
    (listed,) = adds
    assert listed is index


def test_rows_are_added_in_their_order() -> None:
    values = torch.randn(3000, 64)
    expected = torch.zeros(64)
    for value in values:
        expected += value
    found = index_add.index_put(torch.zeros(2, 64), [torch.ones(3000, dtype=torch.long)], values, True)
    assert torch.equal(found[1], expected)


OTHERS = {
    "a mask": ([torch.tensor([True, False, True, True, False])], torch.ones(3, 7)),
    "columns": ([None, torch.tensor([1, 1])], torch.ones(5, 2)),
    "single numbers": ([torch.tensor([1, 1]), torch.tensor([0, 0])], torch.ones(2)),
    "one value for all": ([torch.tensor([1, 1])], torch.ones(())),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_to_eager(adds: list[Tensor], name: str) -> None:
    indices, values = OTHERS[name]
    found = index_add.index_put(torch.zeros(5, 7), indices, values, True)
    assert torch.equal(found, aten.index_put(torch.zeros(5, 7), indices, values, True))
    assert adds == [None]


def test_values_that_take_the_place_of_others_are_not_added() -> None:
    index = torch.tensor([1, 3])
    found = index_add.index_put(torch.ones(5, 7), [index], torch.full((2, 7), 4.0))
    assert torch.equal(found, torch.ones(5, 7).index_fill(0, index, 4.0))


def test_a_place_that_is_not_there_is_eagers_error() -> None:
    for place in (5, -6):
        with pytest.raises(IndexError):
            index_add.index_put(torch.zeros(5, 7), [torch.tensor([place])], torch.ones(1, 7), True)


class Chooses(nn.Module):
    """Some rows, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.after(self.before(x)[rows]).square().mean()


def test_the_gradient_of_chosen_rows_is_added_so(adds: list[Tensor]) -> None:
    torch.manual_seed(0)
    models = pair(Chooses(), BETWEEN_SESSIONS)
    assert_step_as_eager(*models, torch.randn(9, 16), torch.tensor([0, 8, 8, -1, 3]))
    assert [index.tolist() for index in adds] == [[0, 8, 8, -1, 3]]
