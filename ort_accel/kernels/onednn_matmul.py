"""Matrix products in single precision by oneDNN, which PyTorch's eager mode calls for 16-bit products alone.

`torch.ops.mkldnn._linear_pointwise` is private to PyTorch. Inductor calls it for frozen weights. It was checked on
torch 2.13; torch 2.11 and 2.12 have it with the same arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.graph.nodes import fakes_in
from ort_accel.graph.symbolic_sizes import hinted_bytes
from ort_accel.kernels.output_buffers import with_buffer
from ort_accel.memory.heap_tensors import contiguous_in_heap
from ort_accel.runtime.picklable_closures import picklable_by

aten = torch.ops.aten

ONEDNN_OPERATORS = {aten.mm.default, aten.addmm.default}

ONEDNN_FROM_CALL = 3
"""The call of one size from which on oneDNN runs it. oneDNN generates code for each size and keeps it, which pays only
for sizes that come back."""

MAX_ONEDNN_SIZES = 4
"""Sizes of one product that oneDNN runs at most."""

MAX_COUNTED_SIZES = 64
"""Sizes of one product whose calls are counted at a time."""

MAX_RIGHT_BYTES = 16 << 20
"""The largest right operand. oneDNN makes a copy of it in another order while it multiplies."""


@cache
def has_onednn() -> bool:
    """True if this PyTorch can hand oneDNN a product in single precision."""
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_built and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def can_multiply(node: fx.Node) -> bool:
    """True if oneDNN can run this node: a product of matrices in single precision, plus a row at the most."""
    if node.target not in ONEDNN_OPERATORS or not has_onednn():
        return False
    tensors = [tensor for item in (node, *node.all_input_nodes) for tensor in fakes_in(item.meta.get("val"))]
    if any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in tensors):
        return False
    if hinted_bytes(_value(node.args[-1])) > MAX_RIGHT_BYTES:
        return False
    if node.target is aten.mm.default:
        return True
    return len(node.args) == 3 and not node.kwargs and _value(node.args[0]).ndim == 1


def _value(argument: object) -> Tensor:
    assert isinstance(argument, fx.Node)
    value: Tensor = argument.meta["val"]
    return value


def onednn_product(*operands: Tensor) -> Tensor:
    """Return `mm(left, right)` or `addmm(row, left, right)`."""
    *row, left, right = operands
    if not row and _is_cheaper_transposed(left, right):
        return contiguous_in_heap(_product(right.t(), left.t()).t())
    return _product(left, right, *row)


def _product(left: Tensor, right: Tensor, row: Tensor | None = None) -> Tensor:
    rows = contiguous_in_heap(left)  # or the operator copies them, into memory that leaves gaps
    return torch.ops.mkldnn._linear_pointwise(rows, right.t(), row, "none", [], "")  # type: ignore[no-any-return]


def _is_cheaper_transposed(left: Tensor, right: Tensor) -> bool:
    """True if the product of the transposes copies fewer numbers: a left operand that lies transposed is copied."""
    is_transposed = left.t().is_contiguous() and right.is_contiguous() and not left.is_contiguous()
    return is_transposed and left.numel() > right.numel() + left.shape[0] * right.shape[1]


class FrequentSizes:
    """The sizes of a product that came often enough for oneDNN to run them."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[int, ...]] = Counter()
        self._frequent: set[tuple[int, ...]] = set()

    def __contains__(self, size: tuple[int, ...]) -> bool:
        return size in self._frequent

    def came(self, size: tuple[int, ...]) -> bool:
        """Count a call of this size; True if oneDNN runs the size from now on."""
        if len(self._frequent) == MAX_ONEDNN_SIZES:
            return False
        if len(self._calls) == MAX_COUNTED_SIZES and size not in self._calls:
            self._calls.clear()
        self._calls[size] += 1
        if self._calls[size] < ONEDNN_FROM_CALL:
            return False
        self._frequent.add(size)
        return True


def onednn_for_frequent_sizes(target: Any) -> Callable[..., Tensor]:
    """Return the operator, run by oneDNN for sizes that came often."""
    known = FrequentSizes()
    otherwise = with_buffer(target)

    def run(*operands: Tensor) -> Tensor:
        *_, left, right = operands
        rows, columns = left.shape[0], right.shape[1]
        size = (*left.shape, columns)
        if size in known or known.came(size):
            return onednn_product(*operands)
        return otherwise(left.dtype, (rows, columns), *operands)

    run.__name__ = f"{str(target).replace('.', '_')}_of_known_sizes"
    return picklable_by(run, onednn_for_frequent_sizes, target)
