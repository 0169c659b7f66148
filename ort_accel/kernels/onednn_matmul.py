"""Matrix products by oneDNN, a library that comes with PyTorch, whose eager mode asks it for 16-bit products alone.

Private to PyTorch is `torch.ops.mkldnn._linear_pointwise`, which Inductor calls for frozen weights; it was run on torch
2.13, and torch 2.11 and 2.12 have it with the same arguments.
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
from ort_accel.kernels.output_buffers import is_for_pool, placed
from ort_accel.memory.heap_tensors import packed
from ort_accel.runtime.picklable_closures import made_by

aten = torch.ops.aten

PRODUCTS = {aten.mm.default, aten.addmm.default}

AGAIN = 3
"""The call of one size that oneDNN is first asked for. It writes code for each size, which takes 0.4 ms and half a
MiB, and keeps it for 1,024 of them: where each batch has other sizes, that would be waste."""

MOST = 4
"""For so many sizes of a product oneDNN is asked at most."""

REMEMBERED = 64
"""Of so many sizes is counted how often they came."""

LARGEST = 16 << 20
"""The most bytes of the right operand, of which oneDNN makes a copy in another order while it multiplies."""


@cache
def has_onednn() -> bool:
    """Whether this PyTorch can hand it a product in single precision."""
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_built and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def can_multiply(node: fx.Node) -> bool:
    """Whether oneDNN can run this node: a product of matrices in single precision, plus a row at the most."""
    if node.target not in PRODUCTS or not has_onednn() or is_for_pool(node):
        return False
    tensors = [tensor for item in (node, *node.all_input_nodes) for tensor in fakes_in(item.meta.get("val"))]
    if any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in tensors):
        return False
    right: Any = node.args[-1]
    if hinted_bytes(right.meta["val"]) > LARGEST:
        return False
    if node.target is aten.mm.default:
        return True
    added: Any = node.args[0]
    return len(node.args) == 3 and not node.kwargs and added.meta["val"].ndim == 1


def product(*operands: Tensor) -> Tensor:
    """`mm(left, right)` or `addmm(row, left, right)`."""
    *row, left, right = operands
    if not row and _is_cheaper_turned(left, right):
        return packed(_product(right.t(), left.t()).t())
    return _product(left, right, *row)


def _product(left: Tensor, right: Tensor, row: Tensor | None = None) -> Tensor:
    rows = packed(left)  # or the operator copies them, into memory that leaves gaps
    return torch.ops.mkldnn._linear_pointwise(rows, right.t(), row, "none", [], "")  # type: ignore[no-any-return]


def _is_cheaper_turned(left: Tensor, right: Tensor) -> bool:
    """Whether the product of the transposes, transposed, copies fewer numbers. The operator copies a left operand that
    lies transposed in memory, as in the gradient of a weight: 3.7 ms for 1536 x 1024 by 1024 x 384, turned 3.2."""
    is_turned = left.t().is_contiguous() and right.is_contiguous() and not left.is_contiguous()
    return is_turned and left.numel() > right.numel() + left.shape[0] * right.shape[1]


class KnownSizes:
    """Which sizes came so often that oneDNN is asked for them."""

    def __init__(self) -> None:
        self._came: Counter[tuple[int, ...]] = Counter()
        self._prepared: set[tuple[int, ...]] = set()

    def __contains__(self, size: tuple[int, ...]) -> bool:
        return size in self._prepared

    def came(self, size: tuple[int, ...]) -> bool:
        """Count this size; whether that makes it a known one."""
        if len(self._prepared) == MOST:
            return False
        if len(self._came) == REMEMBERED and size not in self._came:
            self._came.clear()
        self._came[size] += 1
        if self._came[size] < AGAIN:
            return False
        self._prepared.add(size)
        return True


def product_of_known_sizes(target: Any) -> Callable[..., Tensor]:
    """The operator, by oneDNN for sizes that came before."""
    known = KnownSizes()
    otherwise = placed(target, pooled=False)

    def run(*operands: Tensor) -> Tensor:
        *_, left, right = operands
        rows, columns = left.shape[0], right.shape[1]
        size = (*left.shape, columns)
        if size in known or known.came(size):
            return product(*operands)
        return otherwise(left.dtype, (rows, columns), *operands)

    run.__name__ = f"{str(target).replace('.', '_')}_of_known_sizes"
    return made_by(run, product_of_known_sizes, target)
