"""What nobody reads beside a loss is not made in training, in graphs for all rows as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ort_accel
from ort_accel.reporting.report import State
from ort_accel.runtime.lazy_tensor import LazyTensor
from tests.against_eager import assert_same, assert_step_as_eager, compilations, pair, report, step
from tests.capture.language_model import VOCABULARY, Model, Output, batch, engine
from tests.tiers import mostly_long

NOTHING_SKIPPED = {"density": {"labels": False, "padding": False}, "compute": {"upstream": False}}
DENSE = [{}, NOTHING_SKIPPED]
"""Either there is nothing to leave out of a batch, or nothing may be left out."""


def dense(seed: int = 0, length: int = 10) -> dict[str, Tensor]:
    """A batch of which every row counts."""
    return batch(4, length, real=1, labelled=1.1, seed=seed)


def state(model: nn.Module) -> State:
    return report(model).features["compute.loss_only"].state


@pytest.mark.parametrize("wishes", DENSE, ids=["dense", "switched off"])
def test_a_whole_graph_does_not_compute_the_logits(wishes: dict[str, Any]) -> None:
    eager, ours = pair(Model(), engine(**wishes))
    for seed, length in enumerate([10, 10, 12, 7]):
        assert_step_as_eager(eager, ours, **dense(seed, length), seed=seed)
    output = ours(**dense(length=9))
    assert type(output.logits) is LazyTensor
    assert output.logits.shape == (4, 9, VOCABULARY)
    assert state(ours) is State.APPLIED
    assert "batches run on some rows" not in report(ours).counters
    assert compilations(ours) == 2


@pytest.mark.parametrize("wishes", mostly_long(DENSE, DENSE[0]), ids=["dense", "switched off"])
def test_logits_that_are_read_are_computed_from_the_next_step_on(wishes: dict[str, Any]) -> None:
    eager, ours = pair(Model(), engine(**wishes))

    def loss(output: Output) -> Tensor:
        assert output.loss is not None
        return output.loss + output.logits.softmax(-1)[..., 3].sum()

    for seed in range(4):
        assert_same(*(step(m, **dense(seed), seed=seed, loss=loss) for m in (ours, eager)))
        if seed == 1:
            warm = compilations(ours)
    assert compilations(ours) == warm
    assert type(ours(**dense()).logits) is Tensor
    assert state(ours) is State.REFUSED


@pytest.mark.parametrize("wishes", DENSE, ids=["dense", "switched off"])
def test_the_backward_gets_no_zeros_for_lazy_logits(wishes: dict[str, Any]) -> None:
    class Large(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4000)

    eager, ours = pair(Large(), engine(**wishes, engine={"run_in_pytorch": ["aten.mm.default"]}))
    given = dense(length=32)
    assert_step_as_eager(eager, ours, **given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        step(ours, **given)
    zeros = [event.input_shapes for event in profiler.events() if event.name == "aten::zeros"]
    filled = [event.input_shapes for event in profiler.events() if event.name in ("aten::zero_", "aten::fill_")]
    assert [4, 32, 4000] not in [shape for shapes in zeros + filled for shape in shapes]


def test_random_numbers_that_only_logits_use_are_drawn() -> None:
    class Noisy(Model):
        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Output:
            loss, logits = super().forward(ids, mask, labels)
            return Output(loss, F.dropout(logits, 0.3))

    after = []
    for model in pair(Noisy(), engine()):
        torch.manual_seed(3)
        model(**dense()).loss.backward()
        after.append(torch.rand(3))
    assert torch.equal(*after)


def test_a_model_that_mutates_a_buffer_computes_its_logits() -> None:
    class Counting(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Output:
            self.calls += 1
            return super().forward(ids, mask, labels)

    eager, ours = pair(Counting(), engine())
    for seed in range(2):
        assert_step_as_eager(eager, ours, **dense(seed), seed=seed)
    assert type(ours(**dense()).logits) is Tensor
    assert ours.calls == 3


@pytest.mark.parametrize(("wish", "kind"), [("auto", Tensor), (True, LazyTensor)])
def test_under_torch_compile_logits_are_computed_unless_loss_only_is_true(wish: Any, kind: type) -> None:
    """What `torch.compile` holds is not compiled anew when they are read."""
    options = {"config": engine(compute={"loss_only": wish})}
    ours = torch.compile(Model(), backend="ort_accel", options=options)
    assert type(ours(**dense()).logits) is kind


def test_a_hook_of_the_model_sees_the_logits() -> None:
    eager, ours = pair(Model(), engine())
    seen: list[Tensor] = []
    ours.register_forward_hook(lambda _module, _inputs, output: seen.append(output.logits.argmax(-1)))
    for seed in range(3):
        given = dense(seed)
        assert_step_as_eager(eager, ours, **given, seed=seed)
        torch.manual_seed(seed)
        assert torch.equal(seen[-1], eager(**given).logits.argmax(-1))


def test_evaluation_computes_the_logits() -> None:
    eager, ours = pair(Model().eval(), engine())
    with torch.no_grad():
        given = dense()
        torch.testing.assert_close(ours(**given).logits, eager(**given).logits, rtol=1e-4, atol=1e-5)
    assert isinstance(ort_accel.restore(ours), Model)
