"""The gradient of an embedding whose weight a head has, too: the rows that occur, added to the head's gradient."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import ort_accel
from ort_accel.passes.fuse_tied_embedding import EMBEDDING_BACKWARD_ONTO, add_embedding_gradient, fuse_tied_embedding
from ort_accel.passes.options import PassOptions
from tests.against_eager import assert_step_as_eager
from tests.tiers import mostly_long

COUNT, WIDTH = 30, 8
COUNTER = "fused tied embedding's gradient"
aten = torch.ops.aten


@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_fused_operator_equals_the_sum(
    by_frequency: bool, padding: int, index: torch.dtype, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    base, grad = torch.randn(COUNT, WIDTH).to(dtype), torch.randn(7, 5, WIDTH).to(dtype)
    grad[0, 0, 0], base[1, 1] = torch.nan, torch.inf
    ids = torch.randint(0, COUNT // 2, (7, 5)).to(index)
    rest = (grad, ids, COUNT, padding, by_frequency)
    expected = base + aten.embedding_dense_backward.default(*rest)
    before = base.clone()
    torch.testing.assert_close(EMBEDDING_BACKWARD_ONTO(base, *rest), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(base, before), "an operator of a graph leaves its operands alone"
    found = add_embedding_gradient(base, *rest)
    assert found is base
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_scale_comes_before_the_sum() -> None:
    base, grad, ids = torch.randn(COUNT, WIDTH), torch.randn(5, WIDTH), torch.randint(0, COUNT, (5,))
    scale = torch.tensor(0.3)
    expected = base * scale + gradient(grad, ids)
    before = base.clone()
    assert torch.equal(EMBEDDING_BACKWARD_ONTO(base, grad, ids, COUNT, -1, False, scale), expected)
    assert torch.equal(base, before)


def test_an_empty_batch_adds_nothing() -> None:
    base = torch.randn(COUNT, WIDTH)
    expected = base.clone()
    assert torch.equal(
        add_embedding_gradient(base, torch.ones(0, 5, WIDTH), torch.ones(0, 5, dtype=torch.long), COUNT, -1, False),
        expected,
    )


def traced(function: Any) -> fx.Graph:
    base, grad, ids = torch.ones(COUNT, WIDTH), torch.ones(4, WIDTH), torch.arange(4)
    return make_fx(function, tracing_mode="fake")(base, grad, ids).graph


def gradient(grad: Tensor, ids: Tensor) -> Tensor:
    return aten.embedding_dense_backward(grad, ids, COUNT, -1, False)


JOINED = {
    "behind": lambda base, grad, ids: base + gradient(grad, ids),
    "in front": lambda base, grad, ids: gradient(grad, ids) + base,
    "twice": lambda base, grad, ids: base + gradient(grad, ids) + gradient(grad * 2, ids),
    "two tables": lambda base, grad, ids: gradient(grad * 2, ids) + gradient(grad, ids),
    "scaled": lambda base, grad, ids: base * grad.sum() + gradient(grad, ids),
}

LEFT = {
    "a share of it": lambda base, grad, ids: torch.add(base, gradient(grad, ids), alpha=2),
    "read by others": lambda base, grad, ids: next((base + table, table * 2) for table in [gradient(grad, ids)]),
    "twice itself": lambda base, grad, ids: next(table + table for table in [gradient(grad, ids)]),
    "a row for all": lambda base, grad, ids: base[0] + gradient(grad, ids),
    "another type": lambda base, grad, ids: base.double() + gradient(grad, ids),
    "a number": lambda base, grad, ids: gradient(grad, ids) + 1,
}


@pytest.mark.parametrize("name", JOINED)
def test_matching_sums_are_fused(name: str) -> None:
    graph = traced(JOINED[name])
    assert fuse_tied_embedding(graph, PassOptions()) == 1 + (name == "twice")
    graph.lint()
    assert not graph.find_nodes(op="call_function", target=aten.add.Tensor)


@pytest.mark.parametrize("name", LEFT)
def test_other_sums_are_not_fused(name: str) -> None:
    graph = traced(LEFT[name])
    assert fuse_tied_embedding(graph, PassOptions()) == 0
    assert not graph.find_nodes(op="call_function", target=EMBEDDING_BACKWARD_ONTO)


class Tied(nn.Module):
    """A language model in small; with two embeddings of the same table if asked for."""

    def __init__(self, sides: int = 1, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(COUNT, WIDTH, **options)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, COUNT, bias=False)
        self.head.weight = self.words.weight
        self.sides = sides

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        if self.sides == 2:
            x = x + self.words(ids.flip(1))
        return functional.cross_entropy(self.head(self.body(x).tanh()).flatten(0, 1), labels.flatten())


ALONE = {"engine": {"run_in_pytorch": ["aten.mm.default", "aten.add.Tensor"]}}
CONFIGS = {"both": {}, "pytorch": ALONE, "memory": {"memory": {"level": 1}}}
OPTIONS = {"plain": {}, "padding": {"padding_idx": 2}, "scaled": {"scale_grad_by_freq": True}}


@pytest.mark.parametrize(
    ("config", "options", "sides"),
    mostly_long(product(CONFIGS, OPTIONS, (1, 2)), *((*both, 2) for both in zip(CONFIGS, OPTIONS, strict=True))),
)
def test_a_model_trains_as_in_eager_mode(config: str, options: str, sides: int) -> None:
    torch.manual_seed(0)
    eager = Tied(sides, **OPTIONS[options])
    ours = ort_accel.accelerate(copy.deepcopy(eager), {**CONFIGS[config], "observe": {"log_level": "error"}})
    for length in (5, 9, 7, 3):
        ids = torch.randint(0, COUNT, (2, length))
        assert_step_as_eager(eager, ours, ids, labels=ids.flip(1))
    assert ort_accel.report(ours).counters[COUNTER] >= sides


def test_a_second_backward_of_one_graph_gives_equal_gradients() -> None:
    torch.manual_seed(0)
    eager = Tied()
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    ids = torch.randint(0, COUNT, (2, 6))
    gradients = []
    for model in (eager, ours):
        loss = model(ids, ids.flip(1))
        gradients += [torch.autograd.grad(loss, model.words.weight, retain_graph=True)[0] for _ in range(2)]
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


def test_without_fusions_nothing_is_fused() -> None:
    ours = ort_accel.accelerate(Tied(), {"compute": {"fusions": False}})
    ids = torch.arange(6).view(2, 3)
    ours(ids, ids).backward()
    assert not ort_accel.report(ours).counters[COUNTER]
