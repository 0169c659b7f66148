"""Heads of language models with their loss, in the forms in which models write them, are one operator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import cycle, product
from multiprocessing import Queue
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import ort_accel
from ort_accel.kernels import linear_cross_entropy as operator
from ort_accel.reporting.segments import Runner
from tests.against_eager import BETWEEN_SESSIONS, assert_same, step
from tests.forked import asked
from tests.tiers import mostly_long

NAME = "fused heads"
VOCABULARY, WIDTH = 1500, 16
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
DECODER = SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}


class Out(NamedTuple):
    loss: Tensor
    logits: Tensor


class Head(nn.Module):
    """A head with the loss of its scores, in one of many forms."""

    def __init__(self, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor, count: Tensor | None = None) -> Out:
        logits = self.head(self.inner(self.embed(ids)).tanh())
        return Out(self.loss(logits, labels, count), logits)

    def loss(self, logits: Tensor, labels: Tensor, count: Tensor | None) -> Tensor:
        return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


class DividedSum(Head):
    def loss(self, logits, labels, count):
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / count


class Shifted(Head):
    """Each token predicts the next one."""

    def loss(self, logits, labels, count):
        scores = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
        return functional.cross_entropy(scores, labels[..., 1:].reshape(-1))


class Smoothed(Head):
    def loss(self, logits, labels, count):
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), label_smoothing=0.1)


class Capped(Head):
    def loss(self, logits, labels, count):
        scores = torch.tanh(logits * 0.7 / 2.0) * 2.0
        return functional.cross_entropy(scores.view(-1, VOCABULARY), labels.view(-1))


class TorchsOwn(Head):
    def forward(self, ids, labels, count=None):
        rows = self.inner(self.embed(ids)).tanh().flatten(0, 1)
        loss = functional.linear_cross_entropy(rows, self.head.weight, labels.flatten(), linear_bias=self.head.bias)
        return Out(loss, rows)


class Weighted(Head):
    def loss(self, logits, labels, count):
        weight = torch.linspace(0.5, 1.5, VOCABULARY)
        return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), weight=weight)


class WithZLoss(Head):
    """A second term reads the scores of all rows."""

    def loss(self, logits, labels, count):
        return super().loss(logits, labels, count) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


class PerToken(Head):
    def loss(self, logits, labels, count):
        return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), reduction="none").square().mean()


def frozen() -> Head:
    model = Head(bias=True)
    model.head.requires_grad_(False)
    return model


FUSED: dict[str, Callable[[], nn.Module]] = {
    "mean": Head,
    "with a bias": lambda: Head(bias=True),
    "tied": lambda: Head(bias=True, tied=True),
    "frozen": frozen,
    "divided sum": DividedSum,
    "shifted": Shifted,
    "smoothed": Smoothed,
    "capped": Capped,
}
if hasattr(functional, "linear_cross_entropy"):
    FUSED["torch's own function"] = lambda: TorchsOwn(bias=True)
REFUSED: dict[str, Callable[[], nn.Module]] = {"weighted": Weighted, "z-loss": WithZLoss, "per token": PerToken}


def batch(ignored: float, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(8, VOCABULARY, (3, 9))
    labels = ids.masked_fill(torch.rand(3, 9) < ignored, -100)
    return {"ids": ids, "labels": labels, "count": (labels != -100).sum()}


QUIET = {"engine": {"compare_with_eager": False}, "observe": {"log_level": "error"}}


def accelerated(model: nn.Module, config: dict | None = None) -> nn.Module:
    return ort_accel.accelerate(copy.deepcopy(model), QUIET | (config or {}))


WHOLE = {"density": {"labels": False, "padding": False}}
WAYS = {
    "sessions": WHOLE,
    "between sessions": WHOLE | BETWEEN_SESSIONS,
    "labelled rows": {"density": {"labels": True}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUSED)
def test_a_head_is_one_operator_with_eagers_gradients(name, way):
    eager = FUSED[name]()
    ours = accelerated(eager, WAYS[way])
    for seed in range(3):
        given = batch(0.4 if way == "labelled rows" else 0.0, seed)
        assert_same(step(ours, **given), step(eager, **given), rtol=1e-5, atol=1e-6)
    report = ort_accel.report(ours)
    assert report.counters[NAME] > 0
    if way != "between sessions":
        assert {segment.runner for segment in report.segments} == {Runner.ORT}
        assert not [item for item in report.fallbacks if "linear_cross_entropy" in item.op]


@pytest.mark.parametrize("name", REFUSED)
def test_other_losses_are_computed_from_scores(name):
    eager = REFUSED[name]()
    ours = accelerated(eager)
    assert_same(step(ours, **batch(0.3)), step(eager, **batch(0.3)))
    assert ort_accel.report(ours).counters[NAME] == 0


def test_without_the_native_library(monkeypatch):
    monkeypatch.setattr(operator, "native_library", lambda: None)
    eager = Head(bias=True)
    ours = accelerated(eager)
    assert_same(step(ours, **batch(0.3)), step(eager, **batch(0.3)), rtol=1e-5, atol=1e-6)
    assert ort_accel.report(ours).counters[NAME] > 0


def test_logits_that_are_read_are_those_of_eager_mode():
    eager = Head(bias=True)
    ours = accelerated(eager)
    given = batch(0.0)
    for _ in range(3):  # the first reading computes the logits anew, and from the next step on the graph does
        found, true = ours(**given), eager(**given)
        torch.testing.assert_close(found.logits + 0, true.logits, rtol=1e-5, atol=1e-6)
        ours.zero_grad(), eager.zero_grad()
        found.loss.backward(), true.loss.backward()
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert ort_accel.report(ours).counters[NAME] == 1


def test_a_second_derivative_is_that_of_the_two_operators():
    eager = Head()
    ours = accelerated(eager)
    found = []
    for model in (eager, ours):
        weight = model.head.weight
        (first,) = torch.autograd.grad(model(**batch(0.0)).loss, weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


def test_in_bfloat16():
    eager = Head(bias=True).bfloat16()
    ours = accelerated(eager)
    mine, theirs = step(ours, **batch(0.2)), step(eager, **batch(0.2))
    assert mine.loss.dtype == theirs.loss.dtype == torch.bfloat16
    for name, gradient in theirs.gradients.items():
        difference = (mine.gradients[name] - gradient).float().norm()
        assert difference <= 0.02 * gradient.float().norm(), name
    assert ort_accel.report(ours).counters[NAME] == 1


def test_under_autocast():
    eager = Head(bias=True)
    ours = accelerated(eager)
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = step(ours, **batch(0.2)), step(eager, **batch(0.2))
    for name, gradient in theirs.gradients.items():
        assert (mine.gradients[name] - gradient).norm() <= 0.02 * gradient.norm(), name
    assert ort_accel.report(ours).counters[NAME] == 1


def test_few_classes_are_no_language_model():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 5)

        def forward(self, x, labels):
            return functional.cross_entropy(self.head(x), labels)

    ours = accelerated(Classifier())
    step(ours, torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))
    assert ort_accel.report(ours).counters[NAME] == 0


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**DECODER)),
    "Llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "BERT": lambda: BertForMaskedLM(BertConfig(**SMALL, num_attention_heads=2, hidden_dropout_prob=0.0)),
    "Gemma 2": lambda: Gemma2ForCausalLM(Gemma2Config(**DECODER, final_logit_softcapping=3.0)),
    "Cohere 2": lambda: Cohere2ForCausalLM(Cohere2Config(**DECODER, logit_scale=0.3)),
    "Granite": lambda: GraniteForCausalLM(GraniteConfig(**DECODER, logits_scaling=4.0)),
}


@pytest.mark.parametrize(
    ("name", "with_count"),
    mostly_long(product(MODELS, [False, True]), *zip(list(MODELS)[::2], cycle([True, False]), strict=False)),
)
def test_models_of_transformers(name, with_count):
    torch.manual_seed(0)
    eager = MODELS[name]()
    ours = accelerated(eager)
    ids = torch.randint(1, VOCABULARY, (2, 8))
    given = {"input_ids": ids, "labels": ids} | ({"num_items_in_batch": torch.tensor(11)} if with_count else {})
    assert_same(step(ours, **given), step(eager, **given))
    assert ort_accel.report(ours).counters[NAME] == 1


class Wide(nn.Module):
    """A head with so many scores that some rows of them are most of a step's memory."""

    columns, width = 40_000, 32

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(self.width, self.width), nn.Linear(self.width, self.columns)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.inner(rows).tanh()), labels)


def peaks(results: Queue, rows: int) -> None:
    """Put the predicted peak of a step with so many rows, and the measured one."""
    model = ort_accel.accelerate(Wide(), QUIET | {"observe": {"log_level": "error", "memory_stats": True}})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.randn(rows, Wide.width), torch.randint(Wide.columns, (rows,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = ort_accel.report(model)
    (memory,) = report.memory.values()
    results.put((memory.frontier[-1].bytes, report.measured_peak.held + report.measured_peak.in_use))


def test_the_peak_of_a_step_does_not_grow_with_vocabulary_times_rows():
    assert operator.rows_at_once(Wide.columns, torch.float32) < 1000
    (few, few_measured), (many, measured) = (asked(peaks, rows) for rows in (1000, 3000))
    of_rows, of_scores = 2000 * Wide.width * 4, 2000 * Wide.columns * 4
    assert 0 < many - few <= 8 * of_rows
    assert measured - few_measured <= of_scores / 20
    assert few == pytest.approx(few_measured, rel=0.1)
    assert many == pytest.approx(measured, rel=0.1)
