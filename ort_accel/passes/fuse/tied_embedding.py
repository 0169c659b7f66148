"""The gradient of an embedding's table, added to another gradient of the same weight: that of a head tied to it.

Autograd makes a table of zeros with some rows in it, and then a sum. For 30,522 words and a width of 384 each of the
two takes 45 MiB, and time to write them; 1,024 tokens have as many rows at most. Those alone are added here, in the
memory of the other gradient where nobody else needs it (`executor/reuse_operands.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.graph.symbolic_sizes import same_shape
from ort_accel.lowering.ops.indexing import embedding_backward
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


def add_embedding_gradient(
    base: Tensor, grad: Tensor, indices: Tensor, count: int, padding: int, by_frequency: bool
) -> Tensor:
    """`base += aten.embedding_dense_backward(...)`, bit for bit but for the sign of zeros."""
    if not base.is_cpu or not indices.numel():  # elsewhere finding the words would wait for the device
        return base.add_(aten.embedding_dense_backward.default(grad, indices, count, padding, by_frequency))
    words, numbers = torch.unique(indices.reshape(-1), return_inverse=True)
    rows = grad.reshape(-1, grad.shape[-1])
    found = aten.embedding_dense_backward.default(rows, numbers, len(words), -1, by_frequency)
    if padding >= 0:
        found[words == padding] = 0
    return base.index_add_(0, words, found)


@torch.library.custom_op("ort_accel::embedding_backward_onto", mutates_args=())
def embedding_backward_onto(
    base: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor, count: int, padding: int, by_frequency: bool
) -> torch.Tensor:
    """The sum, in memory of its own."""
    return add_embedding_gradient(base.clone(), grad, indices, count, padding, by_frequency)


ONTO: Any = torch.ops.ort_accel.embedding_backward_onto.default
lowers(ONTO)(embedding_backward)  # which says why PyTorch runs it


def fuse_tied_embedding(graph: fx.Graph) -> int:
    """Join each sum with the embedding's gradient that only it reads; returns how many."""
    found = 0
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if (operands := _matched(node)) is None:
            continue
        base, table = operands
        with graph.inserting_before(node):
            joined = graph.call_function(ONTO, (base, *table.args))
        joined.meta = dict(node.meta)
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
        graph.erase_node(table)
        found += 1
    return found


def _matched(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The other operand of a sum, and the embedding's gradient."""
    if len(node.args) != 2 or node.kwargs:
        return None
    for base, table in (node.args, node.args[::-1]):
        if not isinstance(table, fx.Node) or not isinstance(base, fx.Node) or base is table:
            continue
        if table.target is aten.embedding_dense_backward.default and len(table.users) == 1:
            return (base, table) if _are_alike(base.meta["val"], table.meta["val"]) else None
    return None


def _are_alike(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.dtype == other.dtype and same_shape(one.shape, other.shape)
