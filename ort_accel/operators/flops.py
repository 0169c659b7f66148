"""Floating point operations of a node, counted where they matter: matrix products, convolutions, attention.

A product and an addition are two operations. Sizes that can change count as they were when the graph was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from ort_accel.kernels.attention_slim import LEAN_BACKWARD, LEAN_FORWARD
from ort_accel.kernels.packed_rows import own

aten = torch.ops.aten

Shape = tuple[int, ...]
Formula = Callable[..., int]


def flops(node: fx.Node) -> int:
    """The estimated floating point operations of a node; 0 for operators whose time is not spent computing."""
    formula = FORMULAS.get(getattr(node.target, "overloadpacket", None)) or OF_OTHERS.get(str(node.target))
    if formula is None:
        return 0
    arguments = fx.map_arg(node.args, lambda argument: shapes(argument.meta.get("val")))
    return formula(*arguments, result=shapes(node.meta.get("val")))


def shapes(value: Any) -> Any:
    """The sizes of a tensor, or of each in a list; what is no tensor stays."""
    if isinstance(value, torch.Tensor):
        return tuple(map(_hint, value.shape))
    return tuple(map(shapes, value)) if isinstance(value, tuple | list) else value


def _hint(size: int | torch.SymInt) -> int:
    """The size that the graph was compiled with; one that depends on data is not known and counts 0."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 0
    return size


def _product(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    columns = right[-1] if len(right) > 1 else 1
    return 2 * prod(left) * columns


def _added_product(_added: Shape, left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    return _product(left, right)


def _linear(rows: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(rows) * (weight[0] if len(weight) > 1 else 1)


def _grouped_product(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Products of groups of rows with a matrix of each group; a group of columns belongs to one matrix only."""
    return _product(left, right) // (left[0] if len(left) == 3 and len(right) == 2 else 1)


def _one_convolution(given: Shape, weight: Shape, made: Shape, transposed: bool) -> int:
    """Each weight is used once for each place of the output, or of the input where that is the smaller side."""
    places = prod((given if transposed else made)[2:])
    return 2 * given[0] * places * prod(weight)


def _convolution(given: Shape, weight: Shape, *more: Any, result: Shape) -> int:
    transposed = more[4]
    return _one_convolution(given, weight, result, transposed)


def _convolution_backward(incoming: Shape, given: Shape, weight: Shape, *more: Any, **_: Any) -> int:
    """The gradients of input and weight each take as much as the forward."""
    transposed, wanted = more[4], more[7]
    return _one_convolution(given, weight, incoming, transposed) * sum(map(int, wanted[:2]))


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Scores, and their product with the values."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(_incoming: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Scores anew; the gradients of scores and values; those of query and key."""
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _of_rows(query: Shape, key: Shape, value: Shape, spans: Shape, *_: Any, **__: Any) -> int:
    """Attention of sequences of equal length; how long each is, the operator's inputs do not tell."""
    return 2 * prod(query[:-1]) * (key[0] // max(spans[0], 1)) * (query[-1] + value[-1])


def _of_rows_backward(
    _incoming: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    _out: Shape,
    _sums: Shape,
    spans: Shape,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * prod(query[:-1]) * (key[0] // max(spans[0], 1)) * (3 * query[-1] + 2 * value[-1])


def _for(names: Sequence[str], formula: Formula) -> dict[Any, Formula]:
    return {getattr(aten, name): formula for name in names}


_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_FUSED = [f"_scaled_dot_product_{kernel}" for kernel in _KERNELS]

FORMULAS: dict[Any, Formula] = {
    **_for(["mm", "bmm", "mv", "dot", "matmul"], _product),
    **_for(["addmm", "baddbmm", "addbmm", "addmv"], _added_product),
    **_for(["linear"], _linear),
    **_for(["_grouped_mm"], _grouped_product),
    **_for(["convolution"], _convolution),
    **_for(["convolution_backward"], _convolution_backward),
    **_for(["scaled_dot_product_attention", *_FUSED], _attention),
    **_for([f"{name}_backward" for name in _FUSED], _attention_backward),
    LEAN_FORWARD: _attention,
    LEAN_BACKWARD: _attention_backward,
    own.scaled_dot_product_of_rows: _of_rows,
    own.scaled_dot_product_of_rows_backward: _of_rows_backward,
}
"""Operators whose arithmetic counts, by name without overload."""

OF_OTHERS: dict[str, Formula] = {
    "transformers.grouped_mm_fallback.default": _grouped_product,
    "transformers.grouped_mm_fallback_backward.default": lambda *given, **_: 2 * _grouped_product(*given),
}
"""Those of transformers, which are there once it is loaded."""
