"""Attention over packed rows, sequence by sequence: with PyTorch's fused kernel, or as products where it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ort_accel.kernels import attention_native, attention_varlen_cuda
from ort_accel.kernels.attention_dense import fused_attention, fused_attention_backward
from ort_accel.kernels.attention_precision import additive_mask
from ort_accel.kernels.packed_spans import CAUSAL, FULL, MASKED, Batch, Pairs, has_varlen
from ort_accel.memory.heap_tensors import contiguous_in_heap

__all__ = ["CAUSAL", "FULL", "MASKED", "attention", "attention_backward", "pairs_at_once"]

aten = torch.ops.aten

PAIRS_PER_THREAD = 2**18
"""Weights that a product makes at once for each thread; they fit the cache of a core."""


class _Attention(NamedTuple):
    """The operands and options that forward and backward share."""

    query: Tensor
    key: Tensor
    value: Tensor
    pairs: Pairs
    keep: float
    scale: float | None

    @property
    def wide(self) -> torch.dtype:
        """The type of products, single precision at the least."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def factor(self) -> float:
        """The number that scores are multiplied by."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def raised(self) -> float:
        """The number that dropout multiplies the weights it keeps by."""
        return 1 / self.keep if self.keep else 0.0

    @property
    def is_fused(self) -> bool:
        """True if PyTorch has a kernel that is fast for short sequences: for the CPU, without dropout."""
        return self.query.device.type == "cpu" and self.pairs.kept is None

    def varlen_lengths(self) -> attention_varlen_cuda.Lengths | None:
        """Return the arguments with which one launch runs all sequences; None where it cannot."""
        if not has_varlen(self.query.device) or self.pairs.kept is not None:
            return None
        return self.pairs.parsed.lengths if attention_varlen_cuda.runs(self.query, self.value) else None

    def widened(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return scaled queries, keys, and values raised for dropout, in the type of products."""
        values = self.value.to(self.wide) * self.raised
        return self.query.to(self.wide) * self.factor, self.key.to(self.wide), values

    def gradient_buffers(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return memory for the gradients of these."""
        parsed = self.pairs.parsed
        return (
            _buffer_maker(query, parsed.every_query_attends)(query.shape),
            _buffer_maker(key, parsed.every_key_is_attended)(key.shape),
            _buffer_maker(value, parsed.every_key_is_attended)(value.shape),
        )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    keep: float,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithm of each row's sum, which only the fused kernel computes."""
    given = _Attention(query, key, value, Pairs(spans, query_rows, key_rows, mask, kept), keep, scale)
    if lengths := given.varlen_lengths():
        return attention_varlen_cuda.forward(query, key, value, lengths, scale)
    if attention_native.runs((query, key, value), given.pairs):
        return attention_native.forward(query, key, value, given.pairs, keep, given.factor)
    return _fused(given) if given.is_fused else _by_products(given)


def _fused(given: _Attention) -> tuple[Tensor, Tensor]:
    query, value = given.query, given.value
    batches = given.pairs.batches()
    operands = zip(*_by_queries(batches, query), *_by_keys(batches, given.key, value), strict=True)
    if _is_whole(batches, query):
        out, logsumexp = map(_rows, fused_attention(next(operands), batches[0].options(given.scale)))
        return out.to(query.dtype), logsumexp.to(given.wide)
    make = _buffer_maker(query, given.pairs.parsed.every_query_attends)
    out, logsumexp = make((*query.shape[:2], value.shape[2])), make(query.shape[:2], dtype=given.wide)
    buffers = zip(*_by_queries(batches, out, logsumexp), strict=True)
    for batch, parts, targets in zip(batches, operands, buffers, strict=True):
        _write(targets, fused_attention(parts, batch.options(given.scale)))
    return out, logsumexp


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    spans: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    keep: float,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    given = _Attention(query, key, value, Pairs(spans, query_rows, key_rows, mask, kept), keep, scale)
    if lengths := given.varlen_lengths():
        return attention_varlen_cuda.backward(grad, query, key, value, (out, logsumexp), lengths, scale)
    if attention_native.runs((query, key, value, grad), given.pairs):
        operands = (query, key, value)
        return attention_native.backward(grad, operands, (out, logsumexp), given.pairs, keep, given.factor)
    return _fused_backward(grad, (out, logsumexp), given) if given.is_fused else _by_products_backward(grad, given)


def _fused_backward(grad: Tensor, results: tuple[Tensor, Tensor], given: _Attention) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = given[:3]
    batches = given.pairs.batches()
    grads, queries, *out_and_sums = _by_queries(batches, grad, query, *results)
    operands = zip(grads, queries, *_by_keys(batches, key, value), *out_and_sums, strict=True)
    if _is_whole(batches, query, key):
        found = map(_rows, fused_attention_backward(next(operands), batches[0].options(given.scale)))
        of_query, of_key, of_value = (one.to(like.dtype) for one, like in zip(found, given[:3], strict=True))
        return of_query, of_key, of_value
    buffers = given.gradient_buffers(query, key, value)
    parts_of_buffers = zip(*_by_queries(batches, buffers[0]), *_by_keys(batches, *buffers[1:]), strict=True)
    for batch, parts, targets in zip(batches, operands, parts_of_buffers, strict=True):
        _write(targets, fused_attention_backward(parts, batch.options(given.scale)))
    return buffers


def _buffer_maker(like: Tensor, is_written: bool) -> Callable[..., Tensor]:
    """Return a function that makes tensors of that type: plain memory where each row is written, otherwise zeros."""
    return like.new_empty if is_written else like.new_zeros


def _is_whole(batches: Sequence[Batch], *tensors: Tensor) -> bool:
    """True if a single batch has every row of queries, and of keys where these are given."""
    if len(batches) != 1:
        return False
    edges = batches[0].query_rows, batches[0].key_rows
    return all(edge == (0, tensor.shape[0]) for edge, tensor in zip(edges, tensors, strict=False))


def _rows(batch: Tensor) -> Tensor:
    """Return [sequences, heads, length, ...] as [rows, heads, ...], the layout of the results of PyTorch's kernels."""
    return contiguous_in_heap(batch.transpose(1, 2).flatten(0, 1))


def _write(targets: Iterable[Tensor], results: Sequence[Tensor]) -> None:
    for target, result in zip(targets, results, strict=True):
        target.copy_(result)


def _by_queries(batches: Sequence[Batch], *tensors: Tensor) -> list[list[Tensor]]:
    """Split tensors with a row a query into the batches, as [sequences, heads, length, ...]."""
    return _split(batches, [batch.query_rows for batch in batches], tensors)


def _by_keys(batches: Sequence[Batch], *tensors: Tensor) -> list[list[Tensor]]:
    """Split tensors with a row a key into the batches."""
    return _split(batches, [batch.key_rows for batch in batches], tensors)


def _split(batches: Sequence[Batch], edges: Sequence[tuple[int, int]], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Make the views of single sequences in one call: one by one they take as long as the kernel."""
    if any(batch.sequences > 1 for batch in batches):
        return [
            [_batched(tensor[slice(*edge)], batch) for edge, batch in zip(edges, batches, strict=True)]
            for tensor in tensors
        ]
    sizes, indices, end = [], [], 0
    for begin, next_end in edges:
        if begin > end:  # rows of sequences that attend to nothing
            sizes.append(begin - end)
        indices.append(len(sizes))
        sizes.append(next_end - begin)
        end = next_end
    found = []
    for tensor in tensors:
        heads = tensor.transpose(0, 1).unsqueeze(0)
        parts = torch.split_with_sizes(heads, [*sizes, tensor.shape[0] - end], 2)
        found.append([parts[index] for index in indices])
    return found


def _batched(rows: Tensor, batch: Batch) -> Tensor:
    return rows.view(batch.sequences, -1, *rows.shape[1:]).transpose(1, 2)


def pairs_at_once() -> int:
    """Return how many weights a product makes at once, unless a single sequence has more."""
    return PAIRS_PER_THREAD * torch.get_num_threads()


def _by_products(given: _Attention) -> tuple[Tensor, Tensor]:
    query = given.query
    scaled, keys, values = given.widened()
    make = _buffer_maker(scaled, given.pairs.parsed.every_query_attends)
    out = make((*query.shape[:2], given.value.shape[2]))
    batches = given.pairs.batches(pairs_at_once() // query.shape[1])
    operands = zip(*_by_queries(batches, scaled, out), *_by_keys(batches, keys, values), strict=True)
    for batch, (query_part, target, *others) in zip(batches, operands, strict=True):
        q, k, v = map(_flat, (query_part, *others))
        _put(torch.bmm(_dropped(_weights(q, k, batch), batch, batch.kept()), v), target)
    return out.to(query.dtype), out.new_zeros(query.shape[:2])


def _by_products_backward(grad: Tensor, given: _Attention) -> tuple[Tensor, Tensor, Tensor]:
    scaled, keys, values = given.widened()
    buffers = given.gradient_buffers(scaled, keys, values)
    batches = given.pairs.batches(pairs_at_once() // given.query.shape[1])
    operands = zip(*_by_queries(batches, scaled, grad.to(given.wide)), *_by_keys(batches, keys, values), strict=True)
    parts_of_buffers = zip(*_by_queries(batches, buffers[0]), *_by_keys(batches, *buffers[1:]), strict=True)
    for batch, parts, targets in zip(batches, operands, parts_of_buffers, strict=True):
        q, grad_out, k, v = map(_flat, parts)
        weights, kept = _weights(q, k, batch), batch.kept()
        grad_weights = _dropped(torch.bmm(grad_out, v.mT), batch, kept)
        grad_scores = aten._softmax_backward_data(grad_weights, weights, -1, given.wide)
        _put(torch.bmm(grad_scores, k), targets[0])
        _put(torch.bmm(grad_scores.mT, q), targets[1])
        _put(torch.bmm(_dropped(weights, batch, kept).mT, grad_out), targets[2])
    buffers[0].mul_(given.factor)
    buffers[2].mul_(given.raised)
    of_query, of_key, of_value = (one.to(like.dtype) for one, like in zip(buffers, given[:3], strict=True))
    return of_query, of_key, of_value


def _weights(query: Tensor, key: Tensor, batch: Batch) -> Tensor:
    """Return the softmax of the scores, [sequences * heads, queries, keys]."""
    scores = torch.bmm(query, key.mT)
    if batch.is_causal:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu_(1), -torch.inf)
    elif (mask := batch.mask()) is not None:
        scores.view(batch.sequences, -1, *scores.shape[1:]).add_(additive_mask(mask, scores.dtype))
    return scores.softmax(-1)


def _dropped(weights: Tensor, batch: Batch, kept: Tensor | None) -> Tensor:
    if kept is not None:  # multiplying by integers of 8 bits is faster than filling
        weights.view(batch.sequences, -1, *weights.shape[1:]).mul_(kept)
    return weights


def _flat(batch: Tensor) -> Tensor:
    """Return [sequences * heads, length, width]; for a single sequence that is a cheaper view."""
    return batch.squeeze(0) if batch.shape[0] == 1 else batch.flatten(0, 1)


def _put(flat: Tensor, target: Tensor) -> None:
    target.copy_(flat.view(target.shape))
