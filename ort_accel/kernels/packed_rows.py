"""Operators on some of the rows of a tensor, for graphs that compute only the rows that count.

`rows_of` takes rows and `rows_into` puts them back; each is the gradient of the other. `rows` lists the places of the
rows, in order and without repetition, and `places` is its inverse: for every place its number among the rows, or -1.

`scaled_dot_product_of_rows` is attention over [rows, heads, width]. Each row of `spans` is a sequence: where its
queries begin and end, where its keys do, and how these attend to those. `mask` and `kept`, which is what a dropout that
keeps each weight with probability `keep` has kept, stand for all pairs of places, and are read where there are rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from ort_accel.kernels.attention_packed import attention, attention_backward

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

own = torch.ops.ort_accel

ON_ROWS = {own.rows_of, own.rows_into, own.scaled_dot_product_of_rows}
"""The operators of forward graphs that compute only some rows."""

ROW_OPERATORS = {*ON_ROWS, own.scaled_dot_product_of_rows_backward}
"""The operators of all graphs that do."""


def _rows_of(source: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return source.index_select(0, rows)


def _rows_into(source: Tensor, rows: Tensor, places: Tensor, count: int) -> Tensor:
    return source.new_zeros((count, *source.shape[1:])).index_copy_(0, rows, source)


for _name, _kernel in {
    "rows_of": _rows_of,
    "rows_into": _rows_into,
    "scaled_dot_product_of_rows": attention,
    "scaled_dot_product_of_rows_backward": attention_backward,
}.items():
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _device)


def described(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what gives an operator's results in form only."""
    return register_fake(name)  # type: ignore[no-any-return]  # torch leaves it untyped


@described("ort_accel::rows_of")
def _(source: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return source.new_empty((rows.shape[0], *source.shape[1:]))


@described("ort_accel::rows_into")
def _(source: Tensor, rows: Tensor, places: Tensor, count: int) -> Tensor:
    return source.new_empty((count, *source.shape[1:]))


@described("ort_accel::scaled_dot_product_of_rows")
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    return out, query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))


@described("ort_accel::scaled_dot_product_of_rows_backward")
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
