"""`precision.cast_propagation.level: 2`: computes the operators that the user allows in autocast's 16-bit dtype.

1. `flood_fill` moves operators whose inputs all come from the 16-bit dtype, or whose readers all cast to it.
2. `insert_and_reduce` moves every allowed operator; `remove_redundant_casts` then removes casts that meet.
3. Sums, means, norms, losses and powers never move: their accumulators must stay in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from ort_accel.graph.meta_keys import PARTITIONER_TAG, RECOMPUTE
from ort_accel.graph.nodes import is_view
from ort_accel.passes.common import CAST, copy_views, is_cast, pinned_tensors, source_of, views_behind
from ort_accel.passes.options import PassOptions

aten = torch.ops.aten

MOVABLE: dict[str, tuple[OpOverload, ...]] = {
    "Add": (aten.add.Tensor, aten.add.Scalar),
    "Div": (aten.div.Tensor, aten.div.Scalar),
    "Dropout": (aten.native_dropout_backward.default,),
    "Gelu": (aten.gelu.default, aten.gelu_backward.default),
    "MatMul": (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
    "Mul": (aten.mul.Tensor, aten.mul.Scalar),
    "Neg": (aten.neg.default,),
    "Relu": (aten.relu.default, aten.threshold_backward.default),
    "Sigmoid": (aten.sigmoid.default, aten.sigmoid_backward.default),
    "Softmax": (aten._softmax.default, aten._safe_softmax.default, aten._softmax_backward_data.default),
    "Sub": (aten.sub.Tensor, aten.sub.Scalar),
    "Swish": (aten.silu.default, aten.silu_backward.default),
    "Tanh": (aten.tanh.default, aten.tanh_backward.default),
    "Where": (aten.where.self,),
}
"""ONNX operators that may compute in 16 bits, with the ATen operators of their forward and backward."""

ALWAYS_MOVABLE = (aten.clone.default,)
"""Operators that move values and compute none; level 2 moves them without being asked."""

WIDE = torch.float32
NARROW = (torch.bfloat16, torch.float16)

Arguments = TypeVar("Arguments", bound=Argument)


def lower_precision(graph: fx.Graph, options: PassOptions) -> int:
    """Compute allowed operators in the graph's 16-bit dtype; returns how many were moved."""
    narrow = _narrow_dtype(graph)
    if narrow is None:
        return 0
    mover = _Mover(graph, narrow, {target for name in options.casts.allow for target in MOVABLE[name]})
    count = mover.move_all() if options.casts.strategy == "insert_and_reduce" else mover.flood_fill()
    for node in reversed(graph.nodes):
        if not node.users and (node.target is CAST or is_view(node)):
            graph.erase_node(node)
    return count


def _narrow_dtype(graph: fx.Graph) -> torch.dtype | None:
    """Returns the 16-bit dtype of most casts; None in a graph without autocast."""
    casts = graph.find_nodes(op="call_function", target=CAST)
    found = Counter(node.meta["val"].dtype for node in casts if node.meta["val"].dtype in NARROW)
    return found.most_common(1)[0][0] if found else None


class _Mover:
    """Moves operators of one graph to the 16-bit dtype."""

    def __init__(self, graph: fx.Graph, narrow: torch.dtype, allowed: set[OpOverload]) -> None:
        self._graph, self._narrow, self._allowed = graph, narrow, allowed
        self._pinned = pinned_tensors(graph)

    def move_all(self) -> int:
        """Put casts around every allowed operator; returns how many."""
        return self._move(lambda node: node.target in self._allowed)

    def flood_fill(self) -> int:
        """Grow the regions that compute in 16 bits until none grows; returns how many operators moved."""
        count = 0
        while moved := self._move(lambda node: self._has_narrow_inputs(node) or self._has_narrow_readers(node)):
            count += moved
        return count

    def _move(self, is_wanted: Callable[[fx.Node], bool]) -> int:
        found = [node for node in self._graph.nodes if self._may_move(node)]
        moved = 0
        for node in found:
            if is_wanted(node):
                self._compute_narrow(node)
                moved += 1
        return moved

    def _may_move(self, node: fx.Node) -> bool:
        if node.op != "call_function" or RECOMPUTE in node.meta:
            return False
        if not (node.target in self._allowed or node.target in ALWAYS_MOVABLE):
            return False
        return _is_wide(node) and self._pinned.isdisjoint(node.all_input_nodes)

    def _has_narrow_inputs(self, node: fx.Node) -> bool:
        """True if all wide inputs are casts from 16 bits; for clones, if no other node reads these inputs."""
        inputs = _wide_inputs(node)
        is_only_reader = node.target not in ALWAYS_MOVABLE or all(len(item.users) == 1 for item in inputs)
        return bool(inputs) and is_only_reader and all(self._narrow_source(item) is not None for item in inputs)

    def _has_narrow_readers(self, node: fx.Node) -> bool:
        """True if all readers cast to 16 bits, and moving the node adds no cast to the graph."""
        to_be_cast = [item for item in _wide_inputs(node) if self._narrow_source(item) is None]
        return bool(node.users) and len(to_be_cast) <= 1 and all(map(self._ends_narrow, node.users))

    def _ends_narrow(self, user: fx.Node) -> bool:
        if user.target is CAST:
            return bool(user.meta["val"].dtype == self._narrow)
        return is_view(user) and bool(user.users) and all(map(self._ends_narrow, user.users))

    def _narrow_source(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
        """Returns the 16-bit tensor that a tensor was cast from, and the views since then, the last one first."""
        views = views_behind(node, with_itself=True)
        cast = source_of(views[-1]) if views else node
        if not is_cast(cast) or cast in self._pinned:
            return None
        source = source_of(cast)
        return (source, views) if source.meta["val"].dtype == self._narrow else None

    def _compute_narrow(self, node: fx.Node) -> None:
        narrowed = {item: self._narrowed(item, node) for item in _wide_inputs(node)}
        node.args = tuple(self._narrow if item is WIDE else item for item in _replaced(node.args, narrowed))
        node.kwargs = _replaced(node.kwargs, narrowed)
        meta = dict(node.meta)
        node.meta["val"] = meta["val"].to(self._narrow)
        with self._graph.inserting_after(node):
            back = self._graph.call_function(CAST, (node,), {"dtype": WIDE})
        back.meta = meta
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)

    def _narrowed(self, item: fx.Node, reader: fx.Node) -> fx.Node:
        """Returns an input in 16 bits: the source of its cast, or a new cast."""
        if (found := self._narrow_source(item)) is not None:
            return copy_views(self._graph, *found)
        with self._graph.inserting_before(reader):
            cast = self._graph.call_function(CAST, (item,), {"dtype": self._narrow})
        cast.meta = {name: reader.meta[name] for name in (PARTITIONER_TAG, "stack_trace") if name in reader.meta}
        cast.meta["val"] = item.meta["val"].to(self._narrow)
        return cast


def _replaced(arguments: Arguments, narrowed: Mapping[fx.Node, fx.Node]) -> Arguments:
    return fx.map_arg(arguments, lambda item: narrowed.get(item, item))


def _is_wide(node: fx.Node) -> bool:
    """True if a node's value is one float32 tensor with dimensions; a scalar takes the dtype of the other operand."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == WIDE and value.ndim > 0


def _wide_inputs(node: fx.Node) -> list[fx.Node]:
    return [item for item in node.all_input_nodes if _is_wide(item)]
