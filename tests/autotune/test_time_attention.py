"""Attention goes to ONNX Runtime as products where a measurement says that it is faster there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ort_accel
from ort_accel.autotune import time_attention
from ort_accel.autotune.throughput import Machine
from ort_accel.autotune.time_attention import AttentionBySize, _min_pairs
from ort_accel.kernels.attention_dense import PYTORCH_ATTENTION, AttentionOptions
from ort_accel.kernels.attention_matmul import AttentionProducts
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions
from tests.against_eager import BETWEEN_SESSIONS, assert_step_as_eager, pair
from tests.hf.tiny import bert, llama

MACHINE = Machine(SessionSettings(threads=2), 20)
COUNTER = "attention by products of ONNX Runtime, where there are many tokens"
HOW = AttentionOptions(None, False, None)


class Noted(AttentionProducts):
    """Products that note what they are asked for, and fail where they are told to."""

    def __init__(self, *failing):
        super().__init__(Sessions(MACHINE.settings))
        self.asked, self.failing = [], failing

    def _note(self, name):
        self.asked.append(name)
        if name in self.failing:
            raise RuntimeError("no memory")

    def forward(self, operands, how):
        self._note("forward")
        return super().forward(operands, how)

    def backward(self, operands, how):
        self._note("backward")
        return super().backward(operands, how)


@pytest.fixture
def products(monkeypatch):
    """Let products be the faster ones for any size."""
    noted = Noted()
    kernels = AttentionBySize(noted, 0)
    monkeypatch.setattr(time_attention, "_measured", lambda *_: kernels)
    return noted


class Attending(nn.Module):
    """Queries, keys and values of one projection, attended to in each of PyTorch's ways."""

    def __init__(self, **how):
        super().__init__()
        self.project, self.how = nn.Linear(16, 48), how

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, **self.how).square().mean()


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.2}], ids=["full", "causal", "scaled"])
def test_a_step_by_products_is_eagers(how, products):
    eager, ours = pair(Attending(**how), BETWEEN_SESSIONS)
    for tokens in (5, 9, 3):
        assert_step_as_eager(eager, ours, torch.randn(3, tokens, 16))
    assert products.asked == ["forward", "backward"] * 3
    assert ort_accel.report(ours).counters[COUNTER] > 0


def assert_padded_steps_as_eager(dropout):
    eager, ours = pair(bert(attention_probs_dropout_prob=dropout).train(), BETWEEN_SESSIONS)
    for kept in ([9, 9, 9], [9, 4, 9]):
        mask = (torch.arange(9) < torch.tensor(kept)[:, None]).long()
        ids, labels = torch.randint(3, 32, (3, 9)), torch.tensor([0, 1, 0])
        assert_step_as_eager(eager, ours, input_ids=ids, attention_mask=mask, labels=labels)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_on_rows_by_products_is_eagers(dropout, products):
    assert_padded_steps_as_eager(dropout)
    assert products.asked[:2] == ["forward", "backward"]
    assert len(products.asked) > 4


@pytest.mark.parametrize("failing", [("forward",), ("backward",)], ids=str)
def test_a_dropout_at_which_products_fail_is_pytorchs(failing, products):
    products.failing = failing
    assert_padded_steps_as_eager(0.3)
    assert products.asked == ["forward", "backward"][: 1 + (failing == ("backward",))]


def test_a_dropout_of_few_weights_is_pytorchs(products, monkeypatch):
    monkeypatch.setattr(time_attention, "_measured", lambda *_: AttentionBySize(products, 10**6))
    assert_padded_steps_as_eager(0.3)
    assert products.asked == []


def test_heads_that_share_keys_by_products_are_eagers(products):
    eager, ours = pair(llama(num_key_value_heads=1), BETWEEN_SESSIONS)
    for tokens in (9, 5):
        ids = torch.randint(3, 32, (3, tokens))
        assert_step_as_eager(eager, ours, input_ids=ids, labels=ids)
    assert products.asked == ["forward", "backward"] * 2


@pytest.mark.parametrize(
    "config",
    [
        {"compute": {"attention": "fused"}},
        {"compute": {"placement": "fixed"}},
        {"engine": {"deterministic": True}},
        {"memory": {"level": 1}},
    ],
    ids=["asked for PyTorch's", "fixed placement", "deterministic", "level 1"],
)
def test_pytorchs_kernel_stays_where_bits_must_repeat_or_it_was_asked_for(config, products):
    eager, ours = pair(Attending(), config)
    assert_step_as_eager(eager, ours, torch.randn(3, 5, 16))
    assert products.asked == []


@pytest.mark.parametrize("failing", [("forward",), ("backward",), ("forward", "backward")], ids=str)
def test_pytorchs_kernel_takes_over_where_products_fail(failing, caplog):
    noted = Noted(*failing)
    kernels = AttentionBySize(noted, 0)
    given = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    grad = torch.randn(2, 3, 5, 8)
    for _ in range(2):
        results = kernels.forward(given, HOW)
        expected = PYTORCH_ATTENTION.forward(given, HOW)
        torch.testing.assert_close(results[0], expected[0])
        found = kernels.backward((grad, *given, *results), HOW)
        torch.testing.assert_close(found, PYTORCH_ATTENTION.backward((grad, *given, *expected), HOW))
    assert noted.asked.count(failing[0]) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "ONNX Runtime failed at attention, which PyTorch runs from now on: no memory"
    ]


@pytest.mark.parametrize(
    ("queries", "how"),
    [
        (torch.randn(2, 3, 5, 8), AttentionOptions(torch.zeros(5, 5), False, None)),
        (torch.randn(2, 3, 5, 8, dtype=torch.float64), HOW),
        (torch.randn(1, 3, 2, 8), HOW),
        (torch.randn(0, 3, 5, 8), HOW),
    ],
    ids=["a mask", "float64", "few", "none"],
)
def test_small_attention_and_what_products_cannot_stays_pytorchs(queries, how):
    noted = Noted()
    given = queries, queries.clone(), queries.clone()
    found = AttentionBySize(noted, 2 * 3 * 5 * 5).forward(given, how)
    torch.testing.assert_close(found, PYTORCH_ATTENTION.forward(given, how))
    assert noted.asked == []


@pytest.mark.parametrize(
    ("saved", "least"),
    [((-2.0, 8.0), 280.0), ((0.5, 8.0), 0.0), ((-1.0, -0.5), None), ((1.0, -0.5), None)],
    ids=["for many", "always", "never", "for few alone"],
)
def test_products_take_what_they_save_time_on(saved, least):
    assert _min_pairs((100, 1000), saved) == least


def test_the_machine_is_asked_once():
    time_attention._measured.cache_clear()
    first = time_attention._measured(MACHINE, 128, 8)
    assert time_attention._measured(MACHINE, 128, 8) is first
    assert time_attention._measured.cache_info().misses == 1
