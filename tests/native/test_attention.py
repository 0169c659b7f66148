"""The attention kernels against a plain computation in double precision, and against PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from ort_accel.native.attention import Attention, Masking, Span
from tests.native.levels import assert_near, each_level, each_type

FULL, CAUSAL, MASKED = Masking
KEEP = 0.75
FIRST_BIT = 5
"""Dropout's bits begin within a byte."""
LENGTHS = [(1, 1), (0, 3), (17, 17), (3, 0), (33, 65), (130, 40), (5, 300)]


@dataclass
class Case:
    """Sequences of random rows, with the mask and the kept weights of each as [heads, queries, keys]."""

    dtype: torch.dtype = torch.float32
    lengths: Sequence[tuple[int, int]] = field(default_factory=lambda: LENGTHS)
    heads: int = 4
    key_heads: int = 2
    dim: int = 20
    value_dim: int | None = None
    masking: Masking = FULL
    offset: int = 0
    window: int = 0
    mask_type: torch.dtype | None = None
    drops: bool = False
    masks: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.dim + self.heads + self.window)
        queries, keys = (sum(pair[side] for pair in self.lengths) for side in (0, 1))
        value_dim = self.value_dim or self.dim
        self.query = torch.randn(queries + 2, self.heads, self.dim).to(self.dtype)
        both = torch.randn(keys + 2, self.key_heads, self.dim + value_dim).to(self.dtype)
        self.key, self.value = both[..., : self.dim], both[..., self.dim :]
        self.grad = torch.randn(queries + 2, self.heads, value_dim).to(self.dtype)
        for shape in ((self.heads, *pair) for pair in self.lengths):
            if self.mask_type is not None:
                self.masks.append(self._mask(shape))
            if self.drops:
                self.kept.append(torch.rand(shape) < KEEP)

    def _mask(self, shape: tuple[int, ...]) -> Tensor:
        if self.mask_type != torch.bool:
            return torch.randn(shape).to(self.mask_type)
        mask = torch.rand(shape) < 0.7
        mask[:, :1] = False  # a query without any key
        return mask

    def spans(self) -> list[Span]:
        """One row on each side of all sequences belongs to none."""
        spans, query, key = [], 1, 1
        for queries, keys in self.lengths:
            spans.append(Span(query, query + queries, key, key + keys, self.masking, self.offset))
            query, key = query + queries, key + keys
        return spans

    def kernels(self, level: int | None) -> Attention:
        """Pads masks and bits to one size for all sequences, so that they have common strides."""
        queries, keys = (max(pair[side] for pair in self.lengths) for side in (0, 1))
        shape = (len(self.lengths), self.heads, queries, keys)
        mask = kept = None
        if self.masks:
            mask = _padded(self.masks, torch.zeros(shape, dtype=self.mask_type))
        if self.kept:
            flat = _padded(self.kept, torch.zeros(shape, dtype=torch.bool)).flatten()
            kept = _packed(torch.cat((torch.zeros(FIRST_BIT, dtype=torch.bool), flat)))
        size, strides = self.heads * queries * keys, (queries * keys, keys)
        spans = [
            span._replace(mask_begin=size * at, kept_begin=FIRST_BIT + size * at)
            for at, span in enumerate(self.spans())
        ]
        keep = KEEP if self.kept else 1.0
        return Attention(spans, 0.3, self.window, mask, strides, kept, strides, keep, level)

    def expected(self) -> list[Tensor]:
        """Returns results, logarithms of sums, and gradients, in double precision."""
        q, k, v = (one.double().detach().requires_grad_() for one in (self.query, self.key, self.value))
        out = torch.zeros_like(self.grad, dtype=torch.double)
        logsumexp = torch.zeros(out.shape[:2], dtype=torch.double)
        for at, span in enumerate(self.spans()):
            rows, keys = slice(span.query_begin, span.query_end), slice(span.key_begin, span.key_end)
            if rows.start != rows.stop:
                result, sums = self._sequence(at, q[rows], k[keys], v[keys])
                out = out.index_copy(0, torch.arange(rows.start, rows.stop), result)
                logsumexp[rows] = sums.detach()
        grads = torch.autograd.grad(out, (q, k, v), self.grad.double())
        return [out.detach(), logsumexp, *grads]

    def _sequence(self, at: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        group = self.heads // self.key_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        scores = scores.masked_fill(~self._attended(q.shape[0], k.shape[0]), -torch.inf)
        if self.masks:
            mask = self.masks[at]
            added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
            scores = scores + added.double()
        is_empty = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(is_empty, 0).softmax(-1).masked_fill(is_empty, 0)
        if self.kept:
            weights = weights * self.kept[at] / KEEP
        return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1).T

    def _attended(self, queries: int, keys: int) -> Tensor:
        distance = torch.arange(queries).unsqueeze(1) + self.offset - torch.arange(keys)
        attended = torch.ones(queries, keys, dtype=torch.bool)
        if self.masking == CAUSAL:
            attended &= distance >= 0
        if self.window:
            attended &= distance.abs() < self.window
        return attended


def _padded(parts: Sequence[Tensor], into: Tensor) -> Tensor:
    for target, part in zip(into, parts, strict=True):
        target[:, : part.shape[1], : part.shape[2]] = part
    return into


def _packed(values: Tensor) -> Tensor:
    padded = torch.cat((values, values.new_zeros(-values.numel() % 8))).view(-1, 8)
    return (padded.to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def _check(case: Case, level: int | None) -> None:
    kernels = case.kernels(level)
    operands = case.query, case.key, case.value
    out, logsumexp = kernels.forward(*operands)
    grads = kernels.backward(case.grad, *operands, out, logsumexp)
    expected = case.expected()
    assert_near(out, expected[0], case.dtype)
    assert_near(logsumexp, expected[1], torch.float32, 4)
    for found, wanted in zip(grads, expected[2:], strict=True):
        assert_near(found, wanted, case.dtype, 4)


@each_level
@each_type
@pytest.mark.parametrize("dim", [1, 7, 16, 32, 33, 64, 80, 96, 128])
def test_head_sizes(dim: int, dtype: torch.dtype, level: int) -> None:
    _check(Case(dtype, dim=dim), level)


@each_level
@each_type
@pytest.mark.parametrize("masking", [FULL, CAUSAL])
@pytest.mark.parametrize(("window", "offset"), [(0, 0), (0, 3), (1, 0), (6, 0), (40, 11), (40, -11)])
def test_causal_and_window(masking: Masking, window: int, offset: int, dtype: torch.dtype, level: int) -> None:
    _check(Case(dtype, masking=masking, window=window, offset=offset), level)


@each_level
@each_type
@pytest.mark.parametrize("mask_type", [torch.bool, torch.float32, torch.bfloat16])
def test_masks(mask_type: torch.dtype, dtype: torch.dtype, level: int) -> None:
    _check(Case(dtype, masking=MASKED, mask_type=mask_type), level)


@each_level
@each_type
@pytest.mark.parametrize("masking", [FULL, CAUSAL])
def test_dropout(masking: Masking, dtype: torch.dtype, level: int) -> None:
    _check(Case(dtype, masking=masking, drops=True), level)


@each_level
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (3, 3), (6, 1), (8, 4)])
def test_grouped_heads(heads: int, key_heads: int, level: int) -> None:
    _check(Case(heads=heads, key_heads=key_heads, value_dim=12), level)


@each_level
@pytest.mark.parametrize("masking", [FULL, CAUSAL])
def test_long_sequences(masking: Masking, level: int) -> None:
    _check(Case(lengths=[(700, 700), (257, 513)], heads=2, dim=64, masking=masking), level)


@each_level
@pytest.mark.parametrize("masking", [FULL, CAUSAL])
def test_division_for_many_threads_gives_the_same_bits(masking: Masking, level: int) -> None:
    case = Case(lengths=[(700, 700), (0, 3), (3, 0), (257, 513)], dim=32, masking=masking, window=400, drops=True)
    whole, divided = (replace(case.kernels(level), threads=threads) for threads in (1, 1000))
    operands = case.query, case.key, case.value
    found = whole.forward(*operands)
    assert all(map(torch.equal, *(kernels.backward(case.grad, *operands, *found) for kernels in (whole, divided))))


@each_level
def test_as_pytorch_has_it(level: int) -> None:
    case = Case(lengths=[(150, 150)] * 3, heads=2, dim=64, masking=CAUSAL)
    rows = [one[1:-1] for one in (case.query, case.key, case.value)]
    spans = [Span(at, at + 150, at, at + 150, CAUSAL) for at in (0, 150, 300)]
    out, logsumexp = Attention(spans, 0.3, level=level).forward(*rows)
    dense = [one.reshape(3, 150, 2, 64).transpose(1, 2) for one in rows]
    theirs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*dense, 0.0, True, scale=0.3)
    torch.testing.assert_close(out.view(3, 150, 2, 64).transpose(1, 2), theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp.view(3, 150, 2).transpose(1, 2), theirs[1], rtol=1e-5, atol=1e-5)


@each_level
@pytest.mark.parametrize("masking", [FULL, CAUSAL])
def test_sequences_of_one_length_equal_packed_ones(masking: Masking, level: int) -> None:
    case = Case(lengths=[(40, 40)] * 3, masking=masking)
    rows = [one[1:-1] for one in (case.query, case.key, case.value, case.grad)]
    packed = Attention([Span(at, at + 40, at, at + 40, masking) for at in (0, 40, 80)], 0.3, level=level)
    equal = Attention([Span(0, 40, 0, 40, masking)] * 3, 0.3, level=level)
    dense = [one.unflatten(0, (3, 40)) for one in rows]
    by_head = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in dense]
    expected = packed.forward(*rows[:3])
    expected_grads = packed.backward(rows[3], *rows[:3], *expected)
    for query, key, value, grad in (dense, by_head):
        found = equal.forward(query, key, value)
        grads = equal.backward(grad, query, key, value, *found)
        for one, other in zip((*found, *grads), (*expected, *expected_grads), strict=True):
            assert torch.equal(one.flatten(0, 1), other)


@each_level
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_not_a_number_reaches_the_rows_that_pytorch_has_it_in(number: float, level: int) -> None:
    case = Case(lengths=[(20, 20), (20, 20)], heads=2, dim=16)
    case.query[3, 1, 5] = number
    case.key[30, 0, 2] = number
    out, _ = case.kernels(level).forward(case.query, case.key, case.value)
    assert torch.equal(out.isnan(), case.expected()[0].isnan())


@each_level
def test_results_do_not_depend_on_threads(level: int) -> None:
    case = Case(lengths=[(90, 90), (31, 31), (120, 120)], dim=32, drops=True)
    operands = case.query, case.key, case.value
    found = []
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        out, logsumexp = case.kernels(level).forward(*operands)
        found.append((out, *case.kernels(level).backward(case.grad, *operands, out, logsumexp)))
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))
