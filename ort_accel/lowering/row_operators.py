"""Operators on some of the rows of a tensor, for graphs that compute only the rows that count.

`rows_of` takes rows and `rows_into` puts them back; each is the gradient of the other. `rows` lists the places of the
rows, in order and without repetition, and `places` is its inverse: for every place its number among the rows, or -1.

`scaled_dot_product_of_rows` is attention over [rows, heads, width]. Each row of `spans` is a sequence: where its
queries begin and end, where its keys do, and how these attend to those. `mask` and `kept`, which is what a dropout that
keeps each weight with probability `keep` has kept, stand for all pairs of places, and are read where there are rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

LIBRARY: Any = Library("ort_accel", "DEF")  # type: ignore[no-untyped-call]

LIBRARY.define("rows_of(Tensor source, Tensor rows, Tensor places) -> Tensor")
LIBRARY.define("rows_into(Tensor source, Tensor rows, Tensor places, SymInt count) -> Tensor")
LIBRARY.define(
    "scaled_dot_product_of_rows(Tensor query, Tensor key, Tensor value, Tensor spans, Tensor query_rows, "
    "Tensor key_rows, Tensor? mask, Tensor? kept, float keep, float? scale) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "scaled_dot_product_of_rows_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor spans, Tensor query_rows, Tensor key_rows, Tensor? mask, Tensor? kept, float keep, "
    "float? scale) "
    "-> (Tensor, Tensor, Tensor)"
)

aten, own = torch.ops.aten, torch.ops.ort_accel

FULL, CAUSAL, MASKED = range(3)
"""How a sequence attends, the last number of its span: each query to all keys, to those up to it, or as a mask says."""


def _rows_of(source: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return source.index_select(0, rows)


def _rows_into(source: Tensor, rows: Tensor, places: Tensor, count: int) -> Tensor:
    return source.new_zeros((count, *source.shape[1:])).index_copy_(0, rows, source)


def _attention(
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
    out = query.new_zeros((*query.shape[:2], value.shape[2]))
    logsumexp = query.new_zeros(query.shape[:2], dtype=_wide(query))
    forward = (_PRODUCTS if kept is not None else _KERNELS[query.device.type])[0]
    pairs = _Pairs(query_rows, key_rows, mask, kept, keep, query.dtype)
    for number, q, k, kind in _sequences(spans):
        how = pairs.of(number, q, k, kind)
        part, lse = forward(_heads_first(query[q]), _heads_first(key[k]), _heads_first(value[k]), scale=scale, **how)
        out[q] = part[0].transpose(0, 1)
        logsumexp[q] = lse[0].transpose(0, 1)
    return out, logsumexp


def _attention_backward(
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
    grads = tuple(item.new_zeros(item.shape) for item in (query, key, value))
    backward = (_PRODUCTS if kept is not None else _KERNELS[query.device.type])[1]
    pairs = _Pairs(query_rows, key_rows, mask, kept, keep, query.dtype)
    for number, q, k, kind in _sequences(spans):
        parts = backward(
            *(_heads_first(item) for item in (grad[q], query[q], key[k], value[k], out[q])),
            logsumexp[q].transpose(0, 1).unsqueeze(0),
            0.0,
            scale=scale,
            **pairs.of(number, q, k, kind),
        )
        for whole, where, part in zip(grads, (q, k, k), parts, strict=True):
            whole[where] = part[0].transpose(0, 1)
    return grads  # type: ignore[return-value]


@dataclass(frozen=True)
class _Dropout:
    """What a dropout keeps of the weights of attention."""

    kept: Tensor
    keep: float

    def __call__(self, weights: Tensor) -> Tensor:
        return weights.masked_fill(~self.kept, 0.0).mul_(1 / self.keep if self.keep else 0.0)


def _by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    dropout: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> tuple[Tensor, Tensor]:
    """Attention as products, with the logarithm of each row's sum; both add up in single precision at the least."""
    scores = _scores(query, key, is_causal=is_causal, mask=attn_mask, scale=scale)
    logsumexp = scores.logsumexp(-1)
    weights = dropout((scores - logsumexp[..., None]).exp())
    return (weights @ value.to(scores.dtype)).to(query.dtype), logsumexp


def _by_products_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    _: float,
    *,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    dropout: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(query, key, is_causal=is_causal, mask=attn_mask, scale=scale)
    weights, slope = (scores - logsumexp[..., None]).exp(), grad.to(scores.dtype)
    change = dropout(slope @ value.to(scores.dtype).mT) - (slope * out).sum(-1, keepdim=True)
    change = weights * change * _scale(query, scale)
    of_query, of_key = change @ key.to(scores.dtype), change.mT @ query.to(scores.dtype)
    of_value = dropout(weights).mT @ slope
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, *, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    wide = _wide(query)
    scores = query.to(wide) @ key.to(wide).mT * _scale(query, scale)
    if is_causal:
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores if mask is None else scores + mask


def _wide(query: Tensor) -> torch.dtype:
    """The type that sums are made in."""
    return torch.promote_types(query.dtype, torch.float32)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


_PRODUCTS: tuple[Callable[..., Any], Callable[..., Any]] = _by_products, _by_products_backward

_KERNELS = {
    "cpu": (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ),
    "cuda": _PRODUCTS,
}
"""Attention of one sequence, and its gradient, by the kind of device, without dropout."""


def _heads_first(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).unsqueeze(0)


def _sequences(spans: Tensor) -> Iterator[tuple[int, slice, slice, int]]:
    """Each sequence's number, its rows among those of the queries and of the keys, and how it attends."""
    for number, (first_query, end_query, first_key, end_key, kind) in enumerate(spans.tolist()):
        if first_query < end_query and first_key < end_key:
            yield number, slice(first_query, end_query), slice(first_key, end_key), kind


@dataclass(frozen=True)
class _Pairs:
    """What is known of each pair of a query and a key, of which a sequence needs some."""

    query_rows: Tensor
    key_rows: Tensor
    mask: Tensor | None
    kept: Tensor | None
    keep: float
    dtype: torch.dtype

    def of(self, number: int, queries: slice, keys: slice, kind: int) -> dict[str, Any]:
        """The arguments of attention for one sequence."""
        rows = self.query_rows[queries], self.key_rows[keys]
        how: dict[str, Any] = {"is_causal": kind == CAUSAL, "attn_mask": None}
        if kind == MASKED:
            assert self.mask is not None
            how["attn_mask"] = _added(_part(self.mask, number, *rows), self.dtype)
        if self.kept is not None:
            how["dropout"] = _Dropout(_part(self.kept, number, *rows), self.keep)
        return how


def _part(pairs: Tensor, number: int, query_rows: Tensor, key_rows: Tensor) -> Tensor:
    """What [batch, heads, queries, keys] has for one sequence; each but the last size may be 1."""
    part = pairs[number if pairs.shape[0] > 1 else 0]
    if part.shape[1] > 1:
        part = _chosen(part, 1, query_rows % part.shape[1])
    return _chosen(part, 2, key_rows % part.shape[2]).unsqueeze(0)


def _chosen(part: Tensor, dim: int, places: Tensor) -> Tensor:
    """Without a copy where the places follow each other, as they do unless padding stands between tokens."""
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return part.narrow(dim, first, len(places))
    return part.index_select(dim, places)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores."""
    if mask.dtype == torch.bool:
        return mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.to(dtype)


for _name, _kernel in {
    "rows_of": _rows_of,
    "rows_into": _rows_into,
    "scaled_dot_product_of_rows": _attention,
    "scaled_dot_product_of_rows_backward": _attention_backward,
}.items():
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _device)


def _described(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what gives an operator's results in form only."""
    return register_fake(name)  # type: ignore[no-any-return]  # torch leaves it untyped


@_described("ort_accel::rows_of")
def _(source: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return source.new_empty((rows.shape[0], *source.shape[1:]))


@_described("ort_accel::rows_into")
def _(source: Tensor, rows: Tensor, places: Tensor, count: int) -> Tensor:
    return source.new_empty((count, *source.shape[1:]))


@_described("ort_accel::scaled_dot_product_of_rows")
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    return out, query.new_empty(query.shape[:2], dtype=_wide(query))


@_described("ort_accel::scaled_dot_product_of_rows_backward")
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (item.new_empty(item.shape) for item in (query, key, value))
    return query, key, value


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    source, rows, places, *_ = inputs
    ctx.save_for_backward(rows, places)
    ctx.count = source.shape[0]


register_autograd(
    "ort_accel::rows_of",
    lambda context, grad: (own.rows_into(grad, *context.saved_tensors, context.count), None, None),
    setup_context=_keep_places,
)
register_autograd(
    "ort_accel::rows_into",
    lambda context, grad: (own.rows_of(grad, *context.saved_tensors), None, None, None),
    setup_context=_keep_places,
)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, keep, scale = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.numbers = keep, scale
    ctx.mark_non_differentiable(output[1])


def _differentiate_attention(context: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    grads = own.scaled_dot_product_of_rows_backward(grad, *context.saved_tensors, *context.numbers)
    return (*grads, *[None] * 7)


register_autograd("ort_accel::scaled_dot_product_of_rows", _differentiate_attention, setup_context=_keep_attention)
