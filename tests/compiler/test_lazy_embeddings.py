"""Models that give embeddings of sentences, for a loss that is computed outside: those of tokens are made if read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ort_accel.reporting.report import State
from ort_accel.runtime.lazy_tensor import LazyTensor
from tests.against_eager import assert_same, compilations, pair, report, step
from tests.capture.language_model import WIDTH, Model, batch, engine


def mean(tokens: Tensor, mask: Tensor) -> Tensor:
    weights = mask[..., None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def first(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens[:, 0]


def last(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens[torch.arange(len(tokens)), mask.sum(1) - 1]


def largest(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.masked_fill(mask[..., None] == 0, -1e9).amax(1)


def mean_of_all(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.mean(1)


class Sentences(NamedTuple):
    """What such models give."""

    tokens: Tensor
    embedding: Tensor


class Embedder(Model):
    """The embedding of each sentence, by its tokens'."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor] = mean) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, ids: Tensor, mask: Tensor) -> Sentences:  # type: ignore[override]
        tokens = self.body(ids, mask)
        return Sentences(tokens, F.normalize(self.pool(tokens, mask), dim=-1))


class Contrast(nn.Module):
    """A loss that runs the model twice in a step, and is not part of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, left: dict[str, Tensor], right: dict[str, Tensor]) -> Tensor:
        scores = self.model(**left).embedding @ self.model(**right).embedding.T
        return F.cross_entropy(scores * 20, torch.arange(len(scores)))


def sentences(seed: int, length: int = 10) -> dict[str, Tensor]:
    found = batch(4, length, seed=seed)
    return {"ids": found["ids"], "mask": found["mask"]}


def feature(model: nn.Module, name: str) -> Any:
    return report(model).features[name]


@pytest.mark.parametrize("pool", [mean, first, last, largest])
def test_padding_is_left_out_if_no_tokens_are_read(pool: Callable[..., Tensor]) -> None:
    eager, ours = pair(Embedder(pool), engine())
    steps = [Contrast(model) for model in (ours, eager)]
    for seed, length in enumerate([10, 12, 9, 10]):
        both = sentences(seed, length), sentences(seed + 10, length + 2)
        assert_same(*(step(model, *both, seed=seed) for model in steps))
    assert feature(ours, "density.padding").state is State.APPLIED
    assert feature(ours, "compute.loss_only").state is State.APPLIED
    assert type(ours(**sentences(0)).tokens) is LazyTensor
    assert ours(**sentences(0)).tokens.shape == (4, 10, WIDTH)
    assert compilations(ours) == 2


def test_padding_that_is_read_is_computed() -> None:
    eager, ours = pair(Embedder(mean_of_all), engine())
    for seed in range(3):
        assert_same(
            *(step(Contrast(model), sentences(seed), sentences(seed + 10), seed=seed) for model in (ours, eager))
        )
    assert feature(ours, "density.padding").state is State.REFUSED


@pytest.mark.parametrize("also", [True, False], ids=["beside the embedding", "alone"])
def test_tokens_that_are_read_are_computed_from_the_next_step_on(also: bool) -> None:
    eager, ours = pair(Embedder(), engine())

    def loss(output: Sentences) -> Tensor:
        return output.tokens.square().mean() + (output.embedding.sum() if also else 0)

    for seed in range(4):
        assert_same(*(step(model, **sentences(seed), seed=seed, loss=loss) for model in (ours, eager)))
        if seed == 1:
            warm = compilations(ours)
    assert compilations(ours) == warm
    assert type(ours(**sentences(0)).tokens) is Tensor
    assert feature(ours, "compute.loss_only").state is State.REFUSED


def test_tokens_that_no_embedding_is_computed_from_are_computed() -> None:
    class Apart(Embedder):
        def forward(self, ids: Tensor, mask: Tensor) -> Sentences:  # type: ignore[override]
            return Sentences(self.body(ids, mask), self.embed(ids[:, 0]))

    eager, ours = pair(Apart(), engine())
    for seed in range(2):
        steps = (
            step(m, **sentences(seed), seed=seed, loss=lambda output: output.tokens.square().sum() + output[1].sum())
            for m in (ours, eager)
        )
        assert_same(*steps)
    assert type(ours(**sentences(0)).tokens) is Tensor


def test_tokens_are_computed_after_a_graph_break() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Embedder(), nn.Linear(WIDTH, 2)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            with threading.Lock():  # Dynamo leaves this to Python, and captures what is called
                tokens, embedding = self.inner(ids, mask)
            return self.head(tokens).mean() + embedding.sum()

    eager, ours = pair(Outer(), engine())
    for seed in range(3):
        assert_same(*(step(model, **sentences(seed), seed=seed) for model in (ours, eager)))
    assert not [item for item in report(ours).fallbacks if "UnreadTensor" in item.detail]
    assert feature(ours, "compute.loss_only").state is State.OFF


@pytest.mark.parametrize("wish", ["auto", True])
def test_under_torch_compile_tokens_are_computed_unless_loss_only_is_true(wish: Any) -> None:
    options = {"config": engine(compute={"loss_only": wish})}
    model = torch.compile(Embedder(), backend="ort_accel", options=options)
    assert type(model(**sentences(0)).tokens) is (LazyTensor if wish is True else Tensor)


def test_evaluation_computes_tokens() -> None:
    eager, ours = pair(Embedder().eval(), engine(engine={"compile_evaluation": True, "dynamic_shapes": True}))
    with torch.no_grad():
        for found, expected in zip(ours(**sentences(0)), eager(**sentences(0)), strict=True):
            assert type(found) is Tensor
            torch.testing.assert_close(found, expected)
