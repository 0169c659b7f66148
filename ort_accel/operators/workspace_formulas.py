"""Bytes that attention and heads with their loss take while they run, as formulas of a node's operands.

The native kernel holds no scores, and packs dropout's mask as bits. Without it, attention with dropout multiplies some
sequences at a time (`kernels/attention_packed.py`), and holds several values of the size of all their pairs. A mask
that says which pairs attend (`kernels/attention_slim.py`) becomes numbers where PyTorch's kernel reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.graph.nodes import fakes_in
from ort_accel.graph.symbolic_sizes import hint, hinted_elements
from ort_accel.kernels import linear_cross_entropy as head_loss
from ort_accel.kernels import linear_token_scores as head_scores
from ort_accel.kernels.attention_packed import pairs_at_once
from ort_accel.kernels.attention_precision import FLASH_BACKWARD, FLASH_FORWARD, is_faster_in_float32
from ort_accel.kernels.bit_mask import bytes_of
from ort_accel.native.attention import takes


def packed_attention(node: fx.Node) -> int:
    """With dropout: scaled queries, keys, values, scores, weights and the inverted mask. Without: one result."""
    query, key, value, *_, kept = _values(node)[:8]
    if takes((query, key, value)):
        return _bits(kept)
    if kept is None:
        return _wide_bytes(query)
    cast = 0 if _is_wide(query) else _wide_bytes(key) + _wide_bytes(query)
    return _wide_bytes(query) + 2 * _wide_bytes(value) + cast + _pair_bytes(kept, 2)


def packed_attention_backward(node: fx.Node) -> int:
    """With dropout: as forward, and the gradient of the weights and its softmax. Without: the three results."""
    grad, query, key, value, *_, kept = _values(node)[:11]
    if takes((grad, query, key, value)):
        return _bits(kept)
    if kept is None:
        return _wide_bytes(query) + _wide_bytes(key) + _wide_bytes(value)
    cast = 0
    if not _is_wide(query):
        cast = _wide_bytes(grad) + _wide_bytes(query) + 2 * _wide_bytes(key) + _wide_bytes(value)
    return _wide_bytes(query) + _wide_bytes(value) + _wide_bytes(grad) + cast + _pair_bytes(kept, 3)


def slim_attention(node: fx.Node) -> int:
    """Operands and results in single precision where that is faster, and the mask as numbers for PyTorch's kernel."""
    *operands, allowed, _, _ = _values(node)
    kernel, tensors = (FLASH_FORWARD, operands) if len(operands) == 3 else (FLASH_BACKWARD, operands[:-1])
    dtype = tensors[0].dtype
    mask = 0 if allowed is None or takes(tensors) else _wide_bytes(allowed)
    if not is_faster_in_float32(kernel, dtype, max(hint(one.shape[2]) for one in tensors)):
        return mask
    return mask + sum(_wide_bytes(one) for one in (*tensors, *fakes_in(node.meta["val"])) if one.dtype == dtype)


def linear_cross_entropy(node: fx.Node) -> int:
    """The scores of some rows, and in 16-bit types the gradient of the weight in single precision."""
    hidden, weight, *_, wanted = _values(node)
    return head_loss.workspace(*_head_sizes(hidden, weight), hidden.dtype, wanted[1])


def linear_token_scores(node: fx.Node) -> int:
    """The scores of some rows, and their gradients or exponentials."""
    hidden, weight, *_ = _values(node)
    return head_scores.workspace(*_head_sizes(hidden, weight), hidden.dtype, False)


def linear_token_scores_backward(node: fx.Node) -> int:
    """As forward, and in 16-bit types the gradient of the weight in single precision."""
    _, _, hidden, weight, *_, wanted = _values(node)
    return head_scores.workspace(*_head_sizes(hidden, weight), hidden.dtype, wanted[1])


def _head_sizes(hidden: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Returns the numbers of rows, of a row's hidden states and of its scores."""
    columns, width = weight.shape
    return hint(hidden.shape[0]), hint(width), hint(columns)


def _bits(kept: Tensor | None) -> int:
    return 0 if kept is None else bytes_of(hinted_elements(kept))


def _values(node: fx.Node) -> list[Any]:
    return [item.meta["val"] if isinstance(item, fx.Node) else item for item in node.args]


def _is_wide(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize >= torch.float32.itemsize


def _wide_bytes(tensor: Tensor) -> int:
    """Return a tensor's bytes in the type that the kernel multiplies in."""
    return hinted_elements(tensor) * max(tensor.dtype.itemsize, torch.float32.itemsize)


def _pair_bytes(kept: Tensor, values: int) -> int:
    """Return the bytes of so many values and of the inverted mask, for the pairs that are multiplied at a time."""
    whole = hinted_elements(kept)
    sequences = max(1, hint(kept.shape[0]))
    at_once = min(whole, max(whole // sequences, pairs_at_once()))
    return at_once * (values * torch.float32.itemsize + kept.dtype.itemsize)
