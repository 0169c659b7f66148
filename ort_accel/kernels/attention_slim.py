"""Fused attention for the CPU. Groups of heads may share keys, and masks are read in each step.

A mask that hides later tokens and nothing else is passed to the kernel as causal, which halves its work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ort_accel.kernels.attention_dense import AttentionOptions, fused_attention, fused_attention_backward
from ort_accel.kernels.attention_precision import FLASH_BACKWARD, FLASH_FORWARD
from ort_accel.kernels.library import define, fake

own = torch.ops.ort_accel


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithm of each row's sum."""
    options = AttentionOptions(*_masking(allowed, is_causal, query, key), scale)
    out, logsumexp = fused_attention((query, key, value), options)
    return out.to(query.dtype), logsumexp


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    allowed: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    options = AttentionOptions(*_masking(allowed, is_causal, query, key), scale)
    found = fused_attention_backward((grad, query, key, value, out, logsumexp), options)
    return tuple(each.to(query.dtype) for each in found)


def _masking(allowed: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """Return the mask if the kernel has to read it, and True if the attention is causal."""
    if allowed is None or allowed.dtype != torch.bool:
        return allowed, is_causal
    has_causal_mask = _is_causal(allowed, query.shape[2], key.shape[2])
    allows_all = not has_causal_mask and bool(_without_repeats(allowed).all())
    return None if has_causal_mask or allows_all else allowed, has_causal_mask


def _is_causal(allowed: Tensor, queries: int, keys: int) -> bool:
    """True if each query may attend to the keys up to its own, and to no others."""
    if queries != keys or keys < 2 or allowed.shape[-2:] != (queries, keys) or not allowed.numel():
        return False
    if bool(allowed[(0,) * (allowed.ndim - 2)][0, -1]):  # most masks that are not causal show it here
        return False
    lower = torch.ones(queries, keys, dtype=torch.bool).tril()
    return not bool((_without_repeats(allowed) != lower).any())


def _without_repeats(allowed: Tensor) -> Tensor:
    """Return a broadcast mask with one of each dimension that repeats the same memory."""
    for dim in range(allowed.ndim - 2):
        if allowed.stride(dim) == 0 and allowed.shape[dim]:
            allowed = allowed.narrow(dim, 0, 1)
    return allowed


define(
    "scaled_dot_product_lean(Tensor query, Tensor key, Tensor value, Tensor? allowed, bool is_causal, float? scale) "
    "-> (Tensor, Tensor)",
    attention,
    "CPU",
)
define(
    "scaled_dot_product_lean_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor? allowed, bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)",
    attention_backward,
    "CPU",
)

SLIM_FORWARD, SLIM_BACKWARD = own.scaled_dot_product_lean, own.scaled_dot_product_lean_backward
"""Attention; `allowed` says which keys a query may attend to, or has numbers to add to the scores."""

SLIM_ATTENTION = {SLIM_FORWARD, SLIM_BACKWARD}


@fake("scaled_dot_product_lean")
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = FLASH_FORWARD(query, key, value)
    return result


@fake("scaled_dot_product_lean_backward")
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *_: object
) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = FLASH_BACKWARD(grad, query, key, value, out, logsumexp, 0.0, False)
    return result
