"""Fuses the gradient of an embedding table with its sum with the gradient of a head that shares the weight.

Autograd writes a whole table for the embedding's gradient, and another for the sum. The fused operator adds the rows of
the batch's tokens alone, in the memory of the head's gradient where that is dead (`executor/reuse_operands.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ort_accel.graph.symbolic_sizes import Size, same_shape
from ort_accel.kernels.kernel_call import KernelCall, Output, chosen_for, fake_of, is_float
from ort_accel.lowering.ops.indexing import embedding_backward
from ort_accel.lowering.registry import lowers
from ort_accel.passes.options import PassOptions

aten = torch.ops.aten


def add_embedding_gradient(
    base: Tensor,
    grad: Tensor,
    indices: Tensor,
    count: int,
    padding: int,
    by_frequency: bool,
    scale: Tensor | None = None,
) -> Tensor:
    """Scale `base`, and add `aten.embedding_dense_backward(...)`, with equal bits apart from the sign of zeros."""
    if scale is not None:
        base.mul_(scale)
    if not base.is_cpu or not indices.numel():  # on CUDA, finding the distinct tokens would wait for the device
        return base.add_(aten.embedding_dense_backward.default(grad, indices, count, padding, by_frequency))
    tokens, positions = torch.unique(indices.reshape(-1), return_inverse=True)
    rows = grad.reshape(-1, grad.shape[-1])
    sums = aten.embedding_dense_backward.default(rows, positions, len(tokens), -1, by_frequency)
    if padding >= 0:
        sums[tokens == padding] = 0
    return base.index_add_(0, tokens, sums)


@torch.library.custom_op("ort_accel::embedding_backward_onto", mutates_args=())
def embedding_backward_onto(
    base: torch.Tensor,
    grad: torch.Tensor,
    indices: torch.Tensor,
    count: int,
    padding: int,
    by_frequency: bool,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the sum in new memory."""
    return add_embedding_gradient(base.clone(), grad, indices, count, padding, by_frequency, scale)


@embedding_backward_onto.register_fake
def _(base: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(base)


EMBEDDING_BACKWARD_ONTO: OpOverload = torch.ops.ort_accel.embedding_backward_onto.default
lowers(EMBEDDING_BACKWARD_ONTO)(embedding_backward)  # refuses the operator, with the reason why PyTorch runs it


@chosen_for(EMBEDDING_BACKWARD_ONTO)
def _call(
    node: fx.Node,
    base: fx.Node,
    grad: fx.Node,
    index: fx.Node,
    rows: Size,
    padding: Size,
    by_frequency: bool,
    scale: fx.Node | None = None,
) -> KernelCall | None:
    is_single = all(map(is_float, (node, base, grad, *([scale] if scale else []))))
    if by_frequency or not is_single or fake_of(index).dtype != torch.int64:
        return None
    count, columns = fake_of(index).numel(), fake_of(node).shape[1]
    return KernelCall("add_embedding_gradient", (base, scale, grad, index, count, columns, padding, Output(0), rows))


def fuse_tied_embedding(graph: fx.Graph, _: PassOptions) -> int:
    """Fuse each sum with the embedding gradient that no other node reads; returns how many."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if (operands := _matched(node)) is None:
            continue
        base, table = operands
        source, scale = base.args if _is_scaled(base) else (base, None)
        with graph.inserting_before(node):
            fused = graph.call_function(EMBEDDING_BACKWARD_ONTO, (source, *table.args, scale))
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        for item in (node, table, *([] if scale is None else [base])):
            graph.erase_node(item)
        count += 1
    return count


def _matched(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns the other operand of a sum and the embedding's gradient; None if the sum does not match."""
    if len(node.args) != 2 or node.kwargs:
        return None
    for base, table in (node.args, node.args[::-1]):
        if not isinstance(table, fx.Node) or not isinstance(base, fx.Node) or base is table:
            continue
        if table.target is aten.embedding_dense_backward.default and len(table.users) == 1:
            return (base, table) if _has_form_of(base.meta["val"], table.meta["val"]) else None
    return None


def _is_scaled(base: fx.Node) -> bool:
    """True for a gradient times a tensor of one number, as a loss in the graph leaves it, that nothing else reads."""
    if base.target is not aten.mul.Tensor or len(base.users) != 1:
        return False
    source, scale = (item.meta["val"] if isinstance(item, fx.Node) else None for item in base.args)
    is_number = isinstance(scale, Tensor) and scale.ndim == 0 and scale.dtype == base.meta["val"].dtype
    return is_number and _has_form_of(source, base.meta["val"])


def _has_form_of(value: object, like: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype == like.dtype and same_shape(value.shape, like.shape)
