"""Sorting stays with PyTorch, whose order of equal values is its own; the report says why."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.through_ort import Lowered

REPEATED = torch.tensor([[3, 1, 3, 2, 1], [0, 0, 0, 5, 5]])

SORTS = {
    "aten.sort.default": lambda x: torch.sort(x),
    "aten.sort.stable": lambda x: torch.sort(x, stable=True, descending=True),
    "aten.topk.default": lambda x: torch.topk(x, 3),
    "aten.median.dim": lambda x: torch.median(x, 1),
}


@pytest.mark.parametrize("op", SORTS)
def test_what_depends_on_the_order_of_equal_values_is_left_to_pytorch(op):
    lowered = Lowered(SORTS[op], [REPEATED])
    assert list(lowered.refusals) == [op]
    assert "unsupported operator: " not in lowered.refusals.values(), "it says why"
    for _ in range(2):
        assert all(map(torch.equal, lowered(REPEATED), SORTS[op](REPEATED)))
