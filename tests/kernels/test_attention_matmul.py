"""Attention as products in ONNX Runtime gives what PyTorch's kernel gives, however it is cut into tiles."""

from __future__ import annotations

import math

import pytest
import torch

from ort_accel.kernels import attention_matmul
from ort_accel.kernels.attention_dense import PYTORCH_ATTENTION, AttentionOptions
from ort_accel.kernels.attention_matmul import AttentionProducts
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions

PRODUCTS = AttentionProducts(Sessions(SessionSettings(threads=2)))


def operands(samples, heads, key_heads, queries, keys, width=8, value_width=8):
    torch.manual_seed(0)
    sizes = [(heads, queries, width), (key_heads, keys, width), (key_heads, keys, value_width)]
    return [torch.randn(samples, tokens, of, wide).transpose(1, 2) for of, tokens, wide in sizes]


def both(given, how):
    """Results and gradients by products, and in float64 by PyTorch."""
    found = []
    grad = torch.randn(*given[0].shape[:3], given[2].shape[3], dtype=torch.float64)
    for kernels, dtype in ((PRODUCTS, torch.float32), (PYTORCH_ATTENTION, torch.float64)):
        cast = [tensor.to(dtype) for tensor in given]
        if kernels is PYTORCH_ATTENTION:  # it shares no keys in float64
            shared = given[0].shape[1] // given[1].shape[1]
            cast = [cast[0], *(tensor.repeat_interleave(shared, 1) for tensor in cast[1:])]
        out, sums = kernels.forward(cast, how)
        of_query, *others = kernels.backward((grad.to(dtype), *cast, out, sums), how)
        if kernels is PYTORCH_ATTENTION:
            others = [tensor.unflatten(1, (-1, shared)).sum(2) for tensor in others]
        found.append([out, of_query, *others])
    return found


SIZES = {
    "plain": (3, 4, 4, 9, 9),
    "one token": (2, 2, 2, 1, 1),
    "shared keys": (2, 6, 2, 7, 7),
    "one head of keys": (2, 3, 1, 5, 5),
    "fewer queries": (2, 4, 4, 3, 11),
    "more queries": (2, 4, 2, 11, 3),
    "odd": (3, 5, 5, 41, 41),
}
TILES = {"one tile": 2**19, "samples": 200, "heads": 90, "queries": 20, "single queries": 1}
"""Pairs of a thread with which these are cut."""


@pytest.mark.parametrize("most", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SIZES)
def test_results_and_gradients_equal_those_of_pytorchs_kernel(name, is_causal, most, monkeypatch):
    monkeypatch.setattr(attention_matmul, "PAIRS_PER_THREAD", most)
    monkeypatch.setattr(attention_matmul, "CAUSAL_ROWS", 4)
    ours, theirs = both(operands(*SIZES[name]), AttentionOptions(None, is_causal, None))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)


def test_a_scale_counts_and_values_may_be_wider():
    given = operands(2, 2, 2, 6, 6)
    plain, _ = both(given, AttentionOptions(None, False, None))
    ours, theirs = both(given, AttentionOptions(None, False, 0.9))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours[0], plain[0])
    query, key, value = operands(2, 2, 2, 6, 6, value_width=12)
    out, _ = PRODUCTS.forward((query, key, value), AttentionOptions(None, False, None))
    torch.testing.assert_close(out, (query @ key.mT / math.sqrt(8)).softmax(-1) @ value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [2**19, 90, 20], ids=["one tile", "heads", "queries"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("keep", [0.7, 0.0])
def test_a_dropout_multiplies_the_weights(keep, is_causal, most, monkeypatch):
    monkeypatch.setattr(attention_matmul, "PAIRS_PER_THREAD", most)
    monkeypatch.setattr(attention_matmul, "CAUSAL_ROWS", 4)
    given = [tensor.requires_grad_() for tensor in operands(3, 4, 2, 9, 9)]
    kept = torch.rand(3, 4, 9, 9) < keep
    how = AttentionOptions(None, is_causal, None, kept.view(torch.uint8), keep)
    out, sums = PRODUCTS.forward([tensor.detach() for tensor in given], how)
    grad = torch.randn(out.shape)
    grads = PRODUCTS.backward((grad, *(tensor.detach() for tensor in given), out, sums), how)
    query, key, value = (given[0], *(tensor.repeat_interleave(2, 1) for tensor in given[1:]))
    scores = query @ key.mT / math.sqrt(8)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -math.inf)
    expected = (scores.softmax(-1) * kept * (1 / keep if keep else 0)) @ value
    torch.testing.assert_close(out, expected.detach(), rtol=1e-4, atol=1e-5)
    expected.backward(grad)
    torch.testing.assert_close(list(grads), [tensor.grad for tensor in given], rtol=1e-4, atol=1e-5)


def test_large_scores_do_not_overflow_and_bad_numbers_stay_where_they_are():
    query, key, value = operands(2, 2, 2, 6, 6)
    how = AttentionOptions(None, True, None)
    out, _ = PRODUCTS.forward((query * 1e4, key, value), how)
    torch.testing.assert_close(out, PYTORCH_ATTENTION.forward((query * 1e4, key, value), how)[0], rtol=1e-4, atol=1e-4)
    value[0, 1, 2, 3] = math.nan
    out, _ = PRODUCTS.forward((query, key, value), how)
    assert torch.equal(out.isnan(), PYTORCH_ATTENTION.forward((query, key, value), how)[0].isnan())


def test_results_lie_in_memory_as_those_of_pytorchs_kernel():
    given, how = operands(2, 4, 4, 6, 6), AttentionOptions(None, False, None)
    found, expected = PRODUCTS.forward(given, how), PYTORCH_ATTENTION.forward(given, how)
    assert found[0].stride() == expected[0].stride()
    assert found[1].shape == expected[1].shape
    grads = [kernels.backward((given[0], *given, *expected), how) for kernels in (PRODUCTS, PYTORCH_ATTENTION)]
    assert [one.stride() for one in grads[0]] == [one.stride() for one in grads[1]]
