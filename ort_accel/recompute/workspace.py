"""What operators take for themselves while they run, where that is as large as their results.

In ONNX Runtime the mask of a dropout becomes numbers twice (`lowering/ops/dropout.py`), `Where` makes two values of the
size of its result before it joins them, `ScatterElements` copies what it writes into, and the gradient of a layer norm
is computed in four values of the size of its first result. PyTorch's kernels for the CPU take little; but attention
over rows with dropout makes its products one after the other (`kernels/attention_packed.py`), and holds several of the
size of all pairs of some sequences at once; and a mask that is looked at in each step (`passes/slim_attention.py`)
becomes numbers where the kernel has to see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ort_accel.graph.nodes import bytes_made
from ort_accel.graph.symbolic_sizes import hint, hinted_elements
from ort_accel.kernels.attention_packed import pairs_at_once
from ort_accel.kernels.attention_slim import LEAN
from ort_accel.kernels.packed_rows import own
from ort_accel.passes.fuse.cross_entropy import JOINED
from ort_accel.reporting import Runner

aten = torch.ops.aten

_FORWARD, _BACKWARD = own.scaled_dot_product_of_rows, own.scaled_dot_product_of_rows_backward


@dataclass(frozen=True)
class Scratch:
    """What an operator takes beside what it reads and gives: bytes, of each value."""

    passing: tuple[int, ...] = ()
    """Gone when its result is made."""
    beside: tuple[int, ...] = ()
    """There with its result."""


_RESULTS = {
    aten.native_dropout_backward: (1, 1),
    aten.where: (0, 2),
    aten.masked_fill: (0, 2),
    aten._safe_softmax: (0, 2),
    aten.native_layer_norm_backward: (0, 4),
    JOINED.overloadpacket: (0, 1),
}
"""How many values of the size of its result an operator takes in ONNX Runtime, and then beside it."""


def scratch(node: fx.Node, runner: Runner) -> Scratch:
    """What an operator takes for itself; of PyTorch's, all as one value."""
    if runner is Runner.ORT:
        passing, beside = _RESULTS.get(_packet(node), (0, 0))
        return Scratch((bytes_made(node),) * passing, (bytes_made(node),) * beside)
    taken = _taken(node)
    return Scratch(beside=(taken,)) if taken else Scratch()


def _taken(node: fx.Node) -> int:
    """What a kernel of PyTorch's takes."""
    packet = _packet(node)
    if packet is _FORWARD:
        query, key, value, *_, kept = _values(node)[:8]
        return _attention(query, key, value, kept)
    if packet is _BACKWARD:
        grad, query, key, value, *_, kept = _values(node)[:11]
        return _attention_backward(grad, query, key, value, kept)
    if packet in LEAN:
        *_, allowed, _, _ = _values(node)
        return 0 if allowed is None else _wide(allowed)
    return 0


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


def _values(node: fx.Node) -> list[Any]:
    return [item.meta["val"] if isinstance(item, fx.Node) else item for item in node.args]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: torch.Tensor | None) -> int:
    """Scaled queries and keys and values, scores and weights, and the mask turned round; without dropout one result."""
    if kept is None:
        return _wide(query)
    cast = 0 if _is_wide(query) else _wide(key) + _wide(query)
    return _wide(query) + 2 * _wide(value) + cast + _pairs(kept, 2)


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: torch.Tensor | None
) -> int:
    """As forward; weights, their change and its softmax at once, and without dropout the three results of a kernel."""
    if kept is None:
        return _wide(query) + _wide(key) + _wide(value)
    cast = 0 if _is_wide(query) else _wide(grad) + _wide(query) + 2 * _wide(key) + _wide(value)
    return _wide(query) + _wide(value) + _wide(grad) + cast + _pairs(kept, 3)


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype.itemsize >= torch.float32.itemsize


def _wide(tensor: torch.Tensor) -> int:
    """Bytes in the type that products are made in."""
    return hinted_elements(tensor) * max(tensor.dtype.itemsize, torch.float32.itemsize)


def _pairs(kept: torch.Tensor, values: int) -> int:
    """Bytes of so many values of all pairs and of the mask turned round, for as many sequences as go at once."""
    whole = hinted_elements(kept)
    sequences = max(1, hint(kept.shape[0]))
    at_once = min(whole, max(whole // sequences, pairs_at_once()))
    return at_once * (values * torch.float32.itemsize + kept.dtype.itemsize)
