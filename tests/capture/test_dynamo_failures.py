"""A fault in a compiler costs speed: PyTorch runs what was not compiled, as eager mode does, and the report says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InstructionTranslator

import ort_accel
from ort_accel.compiler import autograd_graphs
from ort_accel.eager.fallback import FallbackError
from ort_accel.recompute.planner import MemoryPlanner
from ort_accel.reporting.report import State
from tests.against_eager import assert_same, assert_step_as_eager, compilations, not_compiled, pair, report, step
from tests.capture.language_model import Model, Nested, batch, engine

QUIET = engine(engine={"dynamic_shapes": True, "fallback": "report"})
STRICT = engine(engine={"fallback": "error"})


class Counting(nn.Module):
    """Counts how often its code runs in Python, and divides its graph where it is told to."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.drop, self.outer = nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)
        self.breaks, self.runs = breaks, 0

    @torch.compiler.disable
    def count(self) -> None:
        self.runs += 1

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.inner(x))
        if self.breaks:
            self.count()
        return self.outer(hidden).tanh()


def assert_left_to_pytorch(model: nn.Module) -> None:
    """Its one graph was, and the report says so."""
    (found,) = not_compiled(model)
    assert (found.op, found.detail) == ("a graph", "IndexError: no such node")
    assert not report(model).segments


@pytest.fixture
def dynamo_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Has Dynamo fail on all code with such a name: on any for an empty one, on none for None."""
    run = InstructionTranslator.run

    def fails(name: str | None) -> None:
        def broken(self: InstructionTranslator) -> None:
            if name is not None and name in self.f_code.co_name:
                raise KeyError("lost a variable")
            run(self)

        monkeypatch.setattr(InstructionTranslator, "run", broken)

    return fails


@pytest.fixture
def no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What divides a graph into forward and backward fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise IndexError("no such node\nand a second line")

    monkeypatch.setattr(MemoryPlanner, "partition", fail)


def test_a_model_that_dynamo_fails_on_trains_as_in_eager_mode(dynamo_fails: Callable[[str | None], None]) -> None:
    eager, ours = pair(Model(), QUIET)
    dynamo_fails("")
    for seed in range(3):
        assert_same(*(step(model, **batch(4, 10, seed=seed), seed=seed) for model in (ours, eager)))
    found, *parts = not_compiled(ours)
    assert (found.op, found.count) == ("a call of Model", 1), "it is not tried again in every step"
    assert "KeyError: lost a variable" in found.detail
    assert all(part.count == 1 for part in parts), "nor are the parts of it"
    for name in ("density.padding", "density.labels"):
        feature = report(ours).features[name]
        assert (feature.state, "lost a variable" in feature.reason) == (State.REFUSED, True)


def test_a_fault_of_dynamo_is_an_error_where_nothing_may_fall_back(dynamo_fails: Callable[[str | None], None]) -> None:
    ours = ort_accel.accelerate(Counting(), STRICT)
    dynamo_fails("")
    with pytest.raises(FallbackError, match=r"failed to compile, .*lost a variable"):
        ours(torch.randn(3, 6))


@pytest.mark.usefixtures("no_passes")
def test_a_fault_of_a_pass_is_an_error_where_nothing_may_fall_back() -> None:
    with pytest.raises(FallbackError, match="failed to compile, IndexError: no such node"):
        ort_accel.accelerate(Counting(), STRICT)(torch.randn(3, 6))


def test_a_batch_that_eager_mode_refuses_is_no_fault_of_dynamo(dynamo_fails: Callable[[str | None], None]) -> None:
    eager, ours = pair(Counting(), QUIET)
    dynamo_fails("")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        ours(torch.randn(3, 5))
    assert caught.value.__context__ is None
    dynamo_fails(None)
    assert_step_as_eager(eager, ours, torch.randn(3, 6))
    assert compilations(ours) == 2
    assert not not_compiled(ours)


def test_a_call_that_has_begun_goes_on_in_python(dynamo_fails: Callable[[str | None], None]) -> None:
    eager, ours = pair(Counting(breaks=True), QUIET)
    dynamo_fails("resume")
    for seed in range(3):
        x = torch.randn(3, 6)
        assert_same(*(step(model, x, seed=seed) for model in (ours, eager)))
    assert ours.runs == eager.runs == 3
    (found,) = not_compiled(ours)
    assert (found.op.startswith("code of Counting.torch_dynamo_resume_in_forward"), found.count) == (True, 1)
    assert "KeyError: lost a variable" in found.detail
    assert compilations(ours) == 2, "what stands before the break"


def test_code_behind_a_break_that_fails_is_an_error_where_nothing_may_fall_back(
    dynamo_fails: Callable[[str | None], None],
) -> None:
    ours = ort_accel.accelerate(Counting(breaks=True), STRICT)
    dynamo_fails("resume")
    with pytest.raises(FallbackError, match=r"code of .*failed to compile, .*lost a variable"):
        ours(torch.randn(3, 6))


def test_a_batch_that_fails_behind_a_break_leaves_nothing_to_python() -> None:
    class Scaled(Counting):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x) * (1 if scale is None else scale)

    eager, ours = pair(Scaled(breaks=True), QUIET)
    x, scale = torch.randn(3, 6), torch.randn(6)
    with pytest.raises(RuntimeError, match=r"The size of tensor a .* must match") as caught:
        ours(x, torch.randn(5))
    assert type(caught.value) is RuntimeError, "eager mode's own error"
    for seed in range(2):
        assert_same(*(step(model, x, scale, seed=seed) for model in (ours, eager)))
    assert not not_compiled(ours)


def test_only_what_dynamo_fails_on_is_left_to_python() -> None:
    """Each call below is captured by itself."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Counting()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + picked(x)).square()

    def picked(x: Tensor) -> Tensor:
        chosen = torch.zeros_like(x)
        chosen[[x.argmax() // 6], [x.argmax() % 6]] = 1  # numbers from tensors in lists
        return chosen

    eager, ours = pair(Outer(), QUIET)
    for seed in range(4):
        x = torch.randn(3, 6)
        assert_same(*(step(model, x, seed=seed) for model in (ours, eager)))
    assert report(ours).segments, "the layers inside run on the engine"
    outer, innermost = not_compiled(ours)
    assert outer.op == "a call of Outer"
    assert innermost.op.endswith("<locals>.picked")
    assert "setitem" in innermost.detail
    assert "chosen[[x.argmax()" in innermost.where
    assert outer.where == innermost.where
    assert "a graph break" not in {item.op for item in report(ours).fallbacks}


@pytest.fixture
def fails_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the compilation of graphs of a kind fail."""
    lower = autograd_graphs.lower_graph

    def fails(graph: str) -> None:
        def lowered(module: Any, lowering: Any, name: str, *rest: Any) -> Any:
            if name.startswith(graph):
                raise IndexError("no such node\nand a second line")
            return lower(module, lowering, name, *rest)

        monkeypatch.setattr(autograd_graphs, "lower_graph", lowered)

    return fails


@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_a_graph_that_cannot_be_compiled_trains_in_pytorch(graph: str, fails_on: Callable[[str], None]) -> None:
    eager, ours = pair(Counting(), QUIET)
    fails_on(graph)
    for seed, rows in enumerate((3, 4, 3)):
        x = torch.randn(rows, 6)
        assert_same(*(step(model, x, seed=seed) for model in (ours, eager)))
    assert_left_to_pytorch(ours)


def test_a_graph_that_cannot_be_compiled_is_evaluated_in_pytorch(fails_on: Callable[[str], None]) -> None:
    eager, ours = pair(Counting().eval(), QUIET)
    fails_on("inference")
    x = torch.randn(3, 6)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), eager(x))
    assert_left_to_pytorch(ours)


@pytest.mark.usefixtures("no_passes")
def test_a_model_whose_passes_fail_trains_as_in_eager_mode() -> None:
    eager, ours = pair(Model(), QUIET)
    for seed in range(2):
        assert_same(*(step(model, **batch(4, 10, seed=seed), seed=seed) for model in (ours, eager)))
    assert_left_to_pytorch(ours)


def test_checkpoints_within_checkpoints_train_where_all_sizes_are_open() -> None:
    """Dynamo of torch 2.13 fails here, with an error that it does not take for its own."""
    eager, ours = pair(Nested(), QUIET)
    for seed in range(2):
        assert_same(*(step(model, **batch(4, 10, seed=seed), seed=seed) for model in (ours, eager)))
