"""What operators take for themselves while they run, where that is as large as their results.

PyTorch's own kernels for the CPU take little. Attention over rows with dropout makes its products one after the other
(`lowering/row_attention.py`), and holds several of the size of all pairs at once.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from ort_accel.lowering.row_operators import own
from ort_accel.lowering.sizes import hinted_elements

_FORWARD, _BACKWARD = own.scaled_dot_product_of_rows, own.scaled_dot_product_of_rows_backward


def scratch(node: fx.Node) -> int:
    """Bytes beside what the operator reads and gives."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is _FORWARD:
        query, key, value, *_, kept = _values(node)[:8]
        return _attention(query, key, value, kept)
    if packet is _BACKWARD:
        grad, query, key, value, *_, kept = _values(node)[:11]
        return _attention_backward(grad, query, key, value, kept)
    return 0


def _values(node: fx.Node) -> list[Any]:
    return [item.meta.get("val") if isinstance(item, fx.Node) else item for item in node.args]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: torch.Tensor | None) -> int:
    """Scaled queries and keys and values, scores and weights, and the mask turned round; without dropout one result."""
    if kept is None:
        return _wide(query)
    cast = 0 if _is_wide(query) else _wide(key) + _wide(query)
    return _wide(query) + 2 * _wide(value) + cast + _mask(kept) + 2 * _pairs(kept)


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: torch.Tensor | None
) -> int:
    """As forward; weights, their change and its softmax at once, and without dropout the three results of a kernel."""
    if kept is None:
        return _wide(query) + _wide(key) + _wide(value)
    cast = 0 if _is_wide(query) else _wide(grad) + _wide(query) + 2 * _wide(key) + _wide(value)
    return _wide(query) + _wide(value) + _wide(grad) + cast + _mask(kept) + 3 * _pairs(kept)


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype.itemsize >= torch.float32.itemsize


def _wide(tensor: torch.Tensor) -> int:
    """Bytes in the type that products are made in."""
    return hinted_elements(tensor) * max(tensor.dtype.itemsize, torch.float32.itemsize)


def _mask(kept: torch.Tensor) -> int:
    return hinted_elements(kept)


def _pairs(kept: torch.Tensor) -> int:
    return hinted_elements(kept) * torch.float32.itemsize
