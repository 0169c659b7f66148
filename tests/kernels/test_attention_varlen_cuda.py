"""Attention over packed sequences calls CUDA's variable-length kernels with the arguments those document.

The kernels are stood in for by references on the CPU that read the same arguments, so that a wrong length, mask, scale
or layout gives a wrong number.
"""

import pytest
import torch

from ort_accel.kernels import attention_packed, attention_varlen_cuda, packed_spans
from ort_accel.kernels.attention_packed import CAUSAL, FULL, MASKED, attention, attention_backward

HEADS, WIDTH = 2, 8
LENGTHS = (3, 1, 5)


def by_sequence(query, key, value, begins, ends, is_causal, scale):
    """Attention of [rows, heads, width] within sequences, and the logarithm of each row's sum as [heads, rows]."""
    outs, sums = [], []
    for (q0, q1), (k0, k1) in zip(begins, ends, strict=True):
        q, k, v = (item.transpose(0, 1).double() for item in (query[q0:q1], key[k0:k1], value[k0:k1]))
        scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype))
        sums.append(scores.logsumexp(-1).float())
    return torch.cat(outs), torch.cat(sums, 1)


def edges(lengths):
    return list(zip(lengths[:-1].tolist(), lengths[1:].tolist(), strict=True))


def gradients(grad, query, key, value, begins, ends, is_causal, scale):
    given = [item.detach().requires_grad_() for item in (query, key, value)]
    with torch.enable_grad():
        out, _ = by_sequence(*given, begins, ends, is_causal, scale)
    return torch.autograd.grad(out, given, grad)


class Kernels:
    """References for the kernels of a CUDA device, and how often each ran."""

    def __init__(self):
        self.ran = []

    def _flash_attention_forward(self, q, k, v, of_q, of_k, longest_q, longest_k, dropout, causal, debug, *, scale):
        self.ran.append("flash")
        assert (dropout, debug, q.ndim) == (0.0, False, 3)
        assert (longest_q, longest_k) == (int(of_q.diff().max()), int(of_k.diff().max()))
        out, sums = by_sequence(q, k, v, edges(of_q), edges(of_k), causal, scale)
        return out, sums, None, None, None

    def _flash_attention_backward(
        self, grad, q, k, v, out, sums, of_q, of_k, longest_q, longest_k, dropout, causal, state, unused, *, scale
    ):
        self.ran.append("flash backward")
        expected, expected_sums = by_sequence(q, k, v, edges(of_q), edges(of_k), causal, scale)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(sums, expected_sums)
        assert sums.is_contiguous()
        return gradients(grad, q, k, v, edges(of_q), edges(of_k), causal, scale)

    def _efficient_attention_forward(
        self, q, k, v, bias, of_q, of_k, longest_q, longest_k, dropout, mask, with_sums, *, scale
    ):
        self.ran.append("efficient")
        assert (q.shape[0], bias, dropout) == (1, None, 0.0)
        out, sums = by_sequence(q[0], k[0], v[0], edges(of_q), edges(of_k), mask == 1, scale)
        return out[None], sums if with_sums else None, "seed", "offset", longest_q, longest_k

    def _efficient_attention_backward(
        self,
        grad,
        q,
        k,
        v,
        bias,
        out,
        of_q,
        of_k,
        longest_q,
        longest_k,
        sums,
        dropout,
        seed,
        offset,
        mask,
        wants,
        scale,
    ):
        self.ran.append("efficient backward")
        assert (seed, offset, wants) == ("seed", "offset", False)
        assert sums is not None
        found = gradients(grad[0], q[0], k[0], v[0], edges(of_q), edges(of_k), mask == 1, scale)
        return *(item[None] for item in found), None


@pytest.fixture
def kernels(monkeypatch):
    made = Kernels()
    monkeypatch.setattr(attention_varlen_cuda, "aten", made)
    for module in (attention_packed, packed_spans):
        monkeypatch.setattr(module, "has_varlen", lambda device: True)
    return made


def packed_sequences(dtype, kind, lengths=LENGTHS):
    torch.manual_seed(0)
    rows = torch.arange(sum(lengths))
    ends = torch.tensor(lengths).cumsum(0)
    begins = ends - torch.tensor(lengths)
    spans = torch.stack([begins, ends, begins, ends, torch.full_like(ends, kind)], 1)
    tensors = [torch.randn(len(rows), HEADS, WIDTH).to(dtype) for _ in range(4)]
    return tensors, spans, rows


def outcome(tensors, spans, rows, scale=None):
    grad, query, key, value = tensors
    given = (spans, rows, rows, None, None, 1.0, scale)
    out, sums = attention(query, key, value, *given)
    return out, *attention_backward(grad, query, key, value, out, sums, *given)


@pytest.mark.parametrize("kind", [FULL, CAUSAL])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(
    ("dtype", "ran"),
    [
        (torch.bfloat16, ["flash", "flash backward"]),
        (torch.float32, ["efficient", "efficient", "efficient backward"]),
    ],
)
def test_one_launch_gives_what_sequences_give_one_by_one(kernels, monkeypatch, dtype, kind, scale, ran):
    given = packed_sequences(dtype, kind)
    found = outcome(*given, scale)
    assert kernels.ran == ran
    monkeypatch.undo()
    exact = outcome([item.double() for item in given[0]], given[1].clone(), given[2], scale)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0, atol=0.05 if dtype == torch.bfloat16 else 1e-5)


def test_a_sequence_of_one_token_runs_with_causal_ones(kernels):
    tensors, spans, rows = packed_sequences(torch.bfloat16, CAUSAL)
    spans[1, 4] = FULL
    outcome(tensors, spans, rows)
    assert kernels.ran == ["flash", "flash backward"]


def test_masked_or_mixed_sequences_and_odd_widths_run_as_products(kernels):
    for change in ("masked", "mixed", "width"):
        tensors, spans, rows = packed_sequences(torch.bfloat16, FULL)
        mask = None
        if change == "mixed":
            spans[2, 4] = CAUSAL
        elif change == "masked":
            spans[2, 4], mask = MASKED, torch.zeros(1, 1, len(rows), len(rows))
        else:
            tensors = [item[..., :7] for item in tensors]
        attention(*tensors[1:], spans, rows, rows, mask, None, 1.0, None)
        assert not kernels.ran, change
