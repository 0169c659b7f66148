"""Operators on packed rows, for graphs that compute only the rows that count.

`rows_of` takes rows of a tensor and `rows_into` puts them back; each is the gradient of the other. `rows` lists the
positions of the rows, in order and without repetition. `places` is its inverse: for every position its number among
the rows, or -1.

`scaled_dot_product_of_rows` is attention over [rows, heads, width]; `spans` are its sequences (`packed_spans.py`).
`mask`, and `kept`, the weights that a dropout with keep probability `keep` has kept, cover all pairs of positions; they
are read where there are rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.library import register_autograd

from ort_accel.kernels.attention_packed import attention, attention_backward
from ort_accel.kernels.kernel_call import KernelCall, chosen_for, gather
from ort_accel.kernels.library import define, fake

own = torch.ops.ort_accel


def _rows_of(source: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return source.index_select(0, rows)


def _rows_into(source: Tensor, rows: Tensor, places: Tensor, count: int) -> Tensor:
    return source.new_zeros((count, *source.shape[1:])).index_copy_(0, rows, source)


define("rows_of(Tensor source, Tensor rows, Tensor places) -> Tensor", _rows_of, "CPU", "CUDA")
define("rows_into(Tensor source, Tensor rows, Tensor places, SymInt count) -> Tensor", _rows_into, "CPU", "CUDA")
define(
    "scaled_dot_product_of_rows(Tensor query, Tensor key, Tensor value, Tensor spans, Tensor query_rows, "
    "Tensor key_rows, Tensor? mask, Tensor? kept, float keep, float? scale) -> (Tensor, Tensor)",
    attention,
    "CPU",
    "CUDA",
)
define(
    "scaled_dot_product_of_rows_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor spans, Tensor query_rows, Tensor key_rows, Tensor? mask, Tensor? kept, float keep, "
    "float? scale) -> (Tensor, Tensor, Tensor)",
    attention_backward,
    "CPU",
    "CUDA",
)

ON_ROWS = {own.rows_of, own.rows_into, own.scaled_dot_product_of_rows}
"""The operators of forward graphs that compute only some rows."""

ROW_OPERATORS = {*ON_ROWS, own.scaled_dot_product_of_rows_backward}
"""The operators of all graphs that do."""


@fake("rows_of")
def _(source: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return source.new_empty((rows.shape[0], *source.shape[1:]))


@fake("rows_into")
def _(source: Tensor, rows: Tensor, places: Tensor, count: int) -> Tensor:
    return source.new_empty((count, *source.shape[1:]))


@fake("scaled_dot_product_of_rows")
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    return out, query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))


@fake("scaled_dot_product_of_rows_backward")
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (item.new_empty(item.shape) for item in (query, key, value))
    return query, key, value


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    source, rows, places, *_ = inputs
    ctx.save_for_backward(rows, places)
    ctx.count = source.shape[0]


register_autograd(
    "ort_accel::rows_of",
    lambda ctx, grad: (own.rows_into(grad, *ctx.saved_tensors, ctx.count), None, None),
    setup_context=_save_rows,
)
register_autograd(
    "ort_accel::rows_into",
    lambda ctx, grad: (own.rows_of(grad, *ctx.saved_tensors), None, None, None),
    setup_context=_save_rows,
)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, keep, scale = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.numbers = keep, scale
    ctx.mark_non_differentiable(output[1])


def _differentiate_attention(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    grads = own.scaled_dot_product_of_rows_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return (*grads, *[None] * 7)


register_autograd("ort_accel::scaled_dot_product_of_rows", _differentiate_attention, setup_context=_save_attention)


@chosen_for(own.rows_of.default)
def _rows_of_call(_: fx.Node, source: fx.Node, rows: fx.Node, *__: object) -> KernelCall | None:
    return gather(source, rows)
