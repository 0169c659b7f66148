"""Attention as matrix products in ONNX Runtime, tile by tile.

PyTorch's fused kernel multiplies with MKL, in small blocks. Here a tile of scores is large enough for all threads and
small enough for the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ort_accel.kernels.attention_dense import AttentionOptions
from ort_accel.kernels.attention_packed import PAIRS_PER_THREAD
from ort_accel.memory.heap_tensors import empty_in_heap
from ort_accel.runtime.dlpack import to_ort
from ort_accel.runtime.sessions import Run, Sessions

CAUSAL_ROWS = 128
"""The most queries in a tile of a causal attention. A tile has no keys behind its last query."""

_MODEL = """
<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
attention (float[n, g, q, d] query, float[n, g, k, d] key, float[n, g, k, v] value{inputs}) => ({outputs}) {{
    products = com.microsoft.FusedMatMul <transB = 1, alpha = {scale}> (query, key)
    scores = {masking}
    weights = Softmax <axis = -1> (scores)
    {dropping}
    {results}
}}
"""

_FORWARD = "out = com.microsoft.FusedMatMul <alpha = {raised}> ({dropped}, value)"

_BACKWARD = """
    of_value = com.microsoft.FusedMatMul <transA = 1, alpha = {raised}> ({dropped}, grad)
    of_dropped = com.microsoft.FusedMatMul <transB = 1, alpha = {raised}> (grad, value)
    of_weights = {undropping}
    axis = Constant <value_ints = [-1]> ()
    shares = Mul (grad, out)
    share = ReduceSum (shares, axis)
    excess = Sub (of_weights, share)
    of_scores = Mul (weights, excess)
    of_query = com.microsoft.FusedMatMul <alpha = {scale}> (of_scores, key)
    of_key = com.microsoft.FusedMatMul <transA = 1, alpha = {scale}> (of_scores, query)
"""


class _Tile(NamedTuple):
    """A part of the scores: some samples, heads of keys with the queries that share them, queries and keys."""

    samples: slice
    heads: slice
    queries: slice
    keys: int
    shared: int
    is_first: bool
    """No tile before this one had any of its keys."""

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Return the tile's part of keys or values."""
        return tensor[self.samples, self.heads, : self.keys]

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Return the tile's part of queries."""
        heads = slice(self.heads.start * self.shared, self.heads.stop * self.shared)
        return tensor[self.samples, heads, self.queries]

    def stacked(self, tensor: Tensor) -> Tensor:
        """Return the tile's part of queries, with the heads that share keys one below the other."""
        part = self.of_queries(tensor)
        samples, heads, queries, width = part.shape
        return part.reshape(samples, heads // self.shared, self.shared * queries, width)

    @property
    def hidden(self) -> Tensor:
        """Numbers added to the scores so that no query attends to a later key."""
        return _causal_mask(self.queries.start, self.queries.stop, self.keys, self.shared)


class AttentionProducts:
    """Both directions of an attention in single precision, without a mask other than a causal one."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._runs: dict[tuple[bool, bool, float, float | None], Run] = {}

    def __reduce__(self) -> tuple[type[AttentionProducts], tuple[Sessions]]:
        return AttentionProducts, (self._sessions,)

    def drops(self, *_: object) -> bool:
        """Return True: a dropout is one more product."""
        return True

    def forward(self, operands: Sequence[Tensor], how: AttentionOptions) -> Sequence[Tensor]:
        """Return the result, and zeros: nothing is kept for the gradient."""
        query, key, value = operands
        run = self._session(query, how, is_forward=True)
        out = _token_major(query, value.shape[3])
        for tile in self._tiles(query, key, how.is_causal):
            given = [tile.stacked(query), tile.of_keys(key), tile.of_keys(value)]
            [part] = _results(run, given, tile, how)
            _put(part, tile.of_queries(out))
        return out, query.new_zeros(query.shape[:3])

    def backward(self, operands: Sequence[Tensor], how: AttentionOptions) -> Sequence[Tensor]:
        """Return the gradients of query, key and value."""
        grad, query, key, value, out, _ = operands
        run = self._session(query, how, is_forward=False)
        of_query, of_key, of_value = (_token_major(one, one.shape[3]) for one in (query, key, value))
        for tile in self._tiles(query, key, how.is_causal):
            given = [tile.stacked(query), tile.of_keys(key), tile.of_keys(value), tile.stacked(grad), tile.stacked(out)]
            part, *others = _results(run, given, tile, how)
            _put(part, tile.of_queries(of_query))
            for other, whole in zip(others, (of_key, of_value), strict=True):
                target = tile.of_keys(whole)
                target.copy_(other) if tile.is_first else target.add_(other)
        return of_query, of_key, of_value

    def _session(self, query: Tensor, how: AttentionOptions, is_forward: bool) -> Run:
        scale = query.shape[-1] ** -0.5 if how.scale is None else how.scale
        wanted = is_forward, how.is_causal, scale, None if how.kept is None else how.keep
        if wanted not in self._runs:
            self._runs[wanted] = _create(self._sessions, *wanted)
        return self._runs[wanted]

    def _tiles(self, query: Tensor, key: Tensor, is_causal: bool) -> Iterator[_Tile]:
        most_pairs = PAIRS_PER_THREAD * self._sessions.settings.threads
        samples, heads, queries = query.shape[:3]
        key_heads, keys = key.shape[1:3]
        shared = heads // key_heads
        rows = _within(most_pairs // (shared * keys), min(queries, CAUSAL_ROWS) if is_causal else queries)
        heads_at_once = _within(most_pairs // (shared * rows * keys), key_heads)
        samples_at_once = _within(most_pairs // (heads * rows * keys), samples) if heads_at_once == key_heads else 1
        for sample in range(0, samples, samples_at_once):
            for head in range(0, key_heads, heads_at_once):
                of_heads = slice(head, min(head + heads_at_once, key_heads))
                for begin in reversed(range(0, queries, rows)):  # the last ones attend to all keys
                    end = min(begin + rows, queries)
                    is_first = end == queries
                    seen = min(end, keys) if is_causal and not is_first else keys
                    yield _Tile(
                        slice(sample, sample + samples_at_once), of_heads, slice(begin, end), seen, shared, is_first
                    )


def _create(sessions: Sessions, is_forward: bool, is_causal: bool, scale: float, keep: float | None) -> Run:
    from onnx import parser

    optional = {"grad": not is_forward, "out": not is_forward, "hidden": is_causal, "kept": keep is not None}
    types = {"hidden": "float[r, k]", "kept": "uint8[n, g, q, k]"}
    inputs = [name for name, is_there in optional.items() if is_there]
    outputs = ["out"] if is_forward else ["of_query", "of_key", "of_value"]
    words = {
        "scale": repr(scale),
        "raised": repr(1.0 if keep is None else 1 / keep if keep else 0.0),
        "dropped": "weights" if keep is None else "dropped",
        "undropping": "Identity (of_dropped)" if keep is None else "Mul (of_dropped, of_kept)",
    }
    text = _MODEL.format(
        inputs="".join(f", {types.get(name, 'float[n, g, q, v]')} {name}" for name in inputs),
        outputs=", ".join(f"float[a, b, c, {name}_width] {name}" for name in outputs),
        masking="Add (products, hidden)" if is_causal else "Identity (products)",
        dropping="" if keep is None else "of_kept = Cast <to = 1> (kept)\n    dropped = Mul (weights, of_kept)",
        results=(_FORWARD if is_forward else _BACKWARD).format(**words),
        **words,
    )
    model = parser.parse_model(text).SerializeToString()
    given = ["query", "key", "value", *inputs]
    return sessions.create(model, given, outputs, f"attention {'forward' if is_forward else 'backward'}")


def _results(run: Run, given: Sequence[Tensor], tile: _Tile, how: AttentionOptions) -> list[Tensor]:
    hidden = [tile.hidden] if how.is_causal else []
    kept = [] if how.kept is None else [tile.stacked(how.kept)[..., : tile.keys]]
    return run([to_ort(tensor) for tensor in (*given, *hidden, *kept)])


@lru_cache(maxsize=64)
def _causal_mask(begin: int, end: int, keys: int, shared: int) -> Tensor:
    return torch.full((end - begin, keys), -math.inf).triu_(begin + 1).repeat(shared, 1)


def _within(wanted: int, limit: int) -> int:
    return max(1, min(wanted, limit))


def _token_major(like: Tensor, width: int) -> Tensor:
    """Return memory for [batch, heads, tokens, width], token by token like the results of PyTorch's kernels."""
    samples, heads, tokens, _ = like.shape
    return empty_in_heap((samples, tokens, heads, width), like.dtype).transpose(1, 2)


def _put(part: Tensor, target: Tensor) -> None:
    target.copy_(part.view(target.shape))
