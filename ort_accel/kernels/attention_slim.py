"""Fused attention for the CPU over keys that groups of heads share, with masks that are looked at in each step.

A mask that hides what comes later, and nothing else, spares the kernel half of its work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ort_accel.kernels.attention_dense import PYTORCH, How, Kernels
from ort_accel.kernels.attention_precision import BACKWARD, FORWARD
from ort_accel.kernels.packed_rows import LIBRARY, described, own

LIBRARY.define(
    "scaled_dot_product_lean(Tensor query, Tensor key, Tensor value, Tensor? allowed, bool is_causal, float? scale) "
    "-> (Tensor, Tensor)"
)
LIBRARY.define(
    "scaled_dot_product_lean_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor? allowed, bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)"
)

LEAN_FORWARD, LEAN_BACKWARD = own.scaled_dot_product_lean, own.scaled_dot_product_lean_backward
"""Attention over keys that groups of heads share; `allowed` says which keys a query may look at."""

LEAN = {LEAN_FORWARD, LEAN_BACKWARD}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    is_causal: bool,
    scale: float | None,
    kernels: Kernels = PYTORCH,
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithm of each row's sum."""
    how = How(*_masking(allowed, is_causal, query, key), scale)
    out, logsumexp = kernels.forward((query, key, value), how)
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
    kernels: Kernels = PYTORCH,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value."""
    how = How(*_masking(allowed, is_causal, query, key), scale)
    found = kernels.backward((grad, query, key, value, out, logsumexp), how)
    return tuple(each.to(query.dtype) for each in found)


def _masking(allowed: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """How a kernel is told what a mask says: the mask if it has to see it, and whether it is causal."""
    if allowed is None:
        return None, is_causal
    says_causal = _is_causal(allowed, query.shape[2], key.shape[2])
    says_nothing = not says_causal and bool(_once(allowed).all())
    return None if says_causal or says_nothing else allowed, says_causal


def _is_causal(allowed: Tensor, queries: int, keys: int) -> bool:
    """Whether each query may look at the keys up to its own, and at no others."""
    if queries != keys or keys < 2 or allowed.shape[-2:] != (queries, keys) or not allowed.numel():
        return False
    if bool(allowed[(0,) * (allowed.ndim - 2)][0, -1]):  # most masks that are not causal show it here
        return False
    lower = torch.ones(queries, keys, dtype=torch.bool).tril()
    return not bool((_once(allowed) != lower).any())


def _once(allowed: Tensor) -> Tensor:
    """The mask of one of several sequences or heads that have the same in memory."""
    for dim in range(allowed.ndim - 2):
        if allowed.stride(dim) == 0 and allowed.shape[dim]:
            allowed = allowed.narrow(dim, 0, 1)
    return allowed


LIBRARY.impl("scaled_dot_product_lean", attention, "CPU")
LIBRARY.impl("scaled_dot_product_lean_backward", attention_backward, "CPU")


@described("ort_accel::scaled_dot_product_lean")
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return FORWARD(query, key, value)


@described("ort_accel::scaled_dot_product_lean_backward")
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *_: Any) -> Any:
    return BACKWARD(grad, query, key, value, out, logsumexp, 0.0, False)
