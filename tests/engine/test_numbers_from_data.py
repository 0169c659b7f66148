"""What depends on the numbers in a tensor stays in the graph: `.item()`, masks of bools, checks of counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import ort_accel
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.segments import Runner
from tests.against_eager import assert_step_as_eager, assert_two_graphs_each_way, compilations, pair, report
from tests.pictures import IMAGE, placed, tokens
from tests.tiers import all_pairs

MOST = 10
"""Marked tokens that `bounded` allows in a batch."""


class Model(nn.Module):
    """Embeds tokens, and does something with them that `act` says."""

    def __init__(self, act: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 4)
        self.act = act

    def forward(self, ids: Tensor) -> Tensor:
        loss = self.outer(self.act(self, self.embedding(ids), ids)).square().mean()
        return torch.nan_to_num(loss, nan=5.0)  # a mean of nothing is no number


def marked_rows(model: Model, hidden: Tensor, ids: Tensor) -> Tensor:
    return torch.relu(model.inner(hidden[ids == IMAGE]))


def places(model: Model, hidden: Tensor, ids: Tensor) -> Tensor:
    row, column = torch.nonzero(ids == IMAGE, as_tuple=True)
    return hidden + model.inner(hidden[row, column]).sum(0) / (1 + row.shape[0])


def scaled(model: Model, hidden: Tensor, ids: Tensor) -> Tensor:
    return model.inner(hidden) * ids.float().mean().item()


def counted(model: Model, hidden: Tensor, ids: Tensor) -> Tensor:
    count = (ids == IMAGE).sum().item()
    return model.inner(hidden) * (1 + count) + torch.ones(count, 16).sum()


def filled(model: Model, hidden: Tensor, ids: Tensor) -> Tensor:
    return placed(hidden, ids, model.inner(hidden[:, :2]).flatten(0, 1))


def bounded(model: Model, hidden: Tensor, ids: Tensor) -> Tensor:
    """A check of the number itself, not of a tensor."""
    count = (ids == IMAGE).sum().item()
    if torch.compiler.is_compiling():
        torch._check(count <= MOST)
    elif count > MOST:
        raise ValueError(f"{count} tokens for {MOST} parts")
    return model.inner(hidden) * count


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    """What a user may ask of Dynamo."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


SIZES = [(2, 8), (3, 9), (5, 12), (2, 7)]


ACTS = [marked_rows, places, scaled, counted, filled, bounded]
CONFIGS = {"usual": None, "recomputing": {"memory": {"level": 1}}}


@pytest.mark.parametrize(("act", "config"), all_pairs(ACTS, CONFIGS))
def test_it_trains_as_in_eager_mode_and_compiles_no_more_for_other_sizes(
    act: Callable[..., Tensor], config: str
) -> None:
    eager, ours = pair(Model(act), CONFIGS[config])
    compiled = []
    for rows, length in SIZES:
        assert_step_as_eager(eager, ours, tokens(rows, length))
        compiled.append(compilations(ours))
    assert_two_graphs_each_way(compiled)
    assert "a graph break" not in {item.op for item in report(ours).fallbacks}


@pytest.mark.parametrize("act", [marked_rows, places, counted])
def test_nothing_may_be_marked(act: Callable[..., Tensor]) -> None:
    eager, ours = pair(Model(act))
    for marked in (1, 2, 0, 3, 0):
        assert_step_as_eager(eager, ours, tokens(4, 8, marked))


WRONG = [
    (filled, 1, "2 tokens for 4 parts"),
    (filled, 3, "6 tokens for 4 parts"),
    (bounded, 6, "12 tokens for 10 parts"),
]


@pytest.mark.parametrize(("act", "marked", "message"), WRONG)
def test_a_count_that_is_wrong_is_an_error_and_the_next_batch_trains(
    act: Callable[..., Tensor], marked: int, message: str
) -> None:
    eager, ours = pair(Model(act))
    assert_step_as_eager(eager, ours, tokens(2, 8))
    with pytest.raises(ValueError, match=message):
        ours(tokens(2, 8, marked))
    assert_step_as_eager(eager, ours, tokens(2, 8))


@pytest.mark.parametrize(("act", "marked", "message"), WRONG)
def test_evaluation_finds_a_wrong_count_as_well(act: Callable[..., Tensor], marked: int, message: str) -> None:
    ours = ort_accel.accelerate(Model(act).eval(), {"engine": {"compile_evaluation": True}})
    with torch.no_grad():
        assert ours(tokens(2, 8)).isfinite()
        with pytest.raises(ValueError, match=message):
            ours(tokens(2, 8, marked))


class WarmingUp(nn.Module):
    """Its loss grows with a count that its caller passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, count: int) -> Tensor:
        return self.last(torch.relu(self.first(x))).square().mean() * min(1, count / 30)


def test_a_float_that_is_computed_from_a_changing_number_leaves_the_rest_to_onnxruntime() -> None:
    eager, ours = pair(WarmingUp())
    for count in range(3, 9):
        assert_step_as_eager(eager, ours, torch.randn(6, 16), count)
    found = report(ours)
    assert not [item for item in found.fallbacks if item.reason is Reason.FAILED]
    assert any(item.runner is Runner.ORT for item in found.segments)


class Counted(nn.Module):
    """Scales where a whole number is above one that single precision cannot tell from its neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return (self.layer(x) * (numbers > 16777216.0)).sum() + self.layer(x).square().mean()


def test_a_whole_number_is_compared_with_a_float_as_in_eager_mode() -> None:
    eager, ours = pair(Counted(), {"engine": {"run_in_pytorch": ["aten.gt"]}})
    assert_step_as_eager(eager, ours, torch.randn(3, 4), torch.tensor([[16777217], [16777216], [16777300]]))
