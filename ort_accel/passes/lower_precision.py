"""`precision.cast_propagation.level: 2`: operators that a user allows compute in autocast's smaller type.

An operator's numbers then have the precision of the smaller type, as those of products do under autocast. Sums, means,
norms, losses and powers are never moved: what they add up must stay in single precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ort_accel.graph.meta_keys import PARTITIONER_TAG, RECOMPUTE
from ort_accel.graph.nodes import is_view
from ort_accel.passes.remove_redundant_casts import CAST, fixed_in, same_views, views_behind

aten = torch.ops.aten

MOVABLE: dict[str, tuple[Any, ...]] = {
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
"""Operators of ONNX that may compute in 16 bits, as they stand in a graph before lowering, with their gradients."""

COPIES = (aten.clone.default,)
"""What moves numbers without changing any, at every level 2."""

WIDE = torch.float32
NARROW = (torch.bfloat16, torch.float16)


def move_casts(graph: fx.Graph, allow: tuple[str, ...], strategy: str) -> int:
    """Let allowed operators compute in the smaller type of a graph; returns how many do that did not."""
    narrow = _smaller_type(graph)
    if narrow is None:
        return 0
    mover = _Mover(graph, narrow, {target for name in allow for target in MOVABLE[name]})
    count = mover.insert() if strategy == "insert_and_reduce" else mover.flood()
    for node in reversed(graph.nodes):
        if not node.users and (node.target is CAST or is_view(node)):
            graph.erase_node(node)
    return count


def _smaller_type(graph: fx.Graph) -> torch.dtype | None:
    """The type that most casts lead to; None in a graph without autocast."""
    casts = graph.find_nodes(op="call_function", target=CAST)
    found = Counter(node.meta["val"].dtype for node in casts if node.meta["val"].dtype in NARROW)
    return found.most_common(1)[0][0] if found else None


class _Mover:
    """One graph, and what may be moved in it."""

    def __init__(self, graph: fx.Graph, narrow: torch.dtype, allowed: set[Any]) -> None:
        self._graph, self._narrow, self._allowed = graph, narrow, allowed
        self._fixed = fixed_in(graph)

    def insert(self) -> int:
        """Put casts around every allowed operator; those that meet others undo each other later."""
        return self._move(lambda node: node.target in self._allowed)

    def flood(self) -> int:
        """Grow regions of the smaller type from where they are, until nothing more is reached."""
        count = 0
        while moved := self._move(lambda node: self._is_fed(node) or self._is_read(node)):
            count += moved
        return count

    def _move(self, wanted: Callable[[fx.Node], bool]) -> int:
        found = [node for node in self._graph.nodes if self._may_move(node)]
        return sum(self._compute_narrow(node) for node in found if wanted(node))

    def _may_move(self, node: fx.Node) -> bool:
        if node.op != "call_function" or RECOMPUTE in node.meta:
            return False
        if not (node.target in self._allowed or node.target in COPIES):
            return False
        return _is_wide(node) and self._fixed.isdisjoint(node.all_input_nodes)

    def _is_fed(self, node: fx.Node) -> bool:
        """Whether all that is computed with comes from the smaller type."""
        inputs = _wide_inputs(node)
        alone = node.target not in COPIES or all(len(item.users) == 1 for item in inputs)
        return bool(inputs) and alone and all(self._source(item) is not None for item in inputs)

    def _is_read(self, node: fx.Node) -> bool:
        """Whether the result goes into the smaller type only, for no more casts than there were."""
        outside = [item for item in _wide_inputs(node) if self._source(item) is None]
        return bool(node.users) and len(outside) <= 1 and all(map(self._ends_narrow, node.users))

    def _ends_narrow(self, user: fx.Node) -> bool:
        if user.target is CAST:
            return bool(user.meta["val"].dtype == self._narrow)
        return is_view(user) and bool(user.users) and all(map(self._ends_narrow, user.users))

    def _source(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
        """What a tensor was before it was cast from the smaller type, and the views since then, the last one first."""
        views = views_behind(node, itself=True)
        cast: Any = views[-1].args[0] if views else node
        if not (isinstance(cast, fx.Node) and cast.target is CAST) or cast in self._fixed:
            return None
        source: Any = cast.args[0]
        return (source, views) if source.meta["val"].dtype == self._narrow else None

    def _compute_narrow(self, node: fx.Node) -> bool:
        narrowed = {item: self._narrowed(item, node) for item in _wide_inputs(node)}
        node.args = tuple(self._narrow if item is WIDE else item for item in _replaced(node.args, narrowed))
        node.kwargs = _replaced(node.kwargs, narrowed)
        meta = dict(node.meta)
        node.meta["val"] = meta["val"].to(self._narrow)
        with self._graph.inserting_after(node):
            back = self._graph.call_function(CAST, (node,), {"dtype": WIDE})
        back.meta = meta
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
        return True

    def _narrowed(self, item: fx.Node, reader: fx.Node) -> fx.Node:
        """An input in the smaller type: as it was before a cast, or cast."""
        if (found := self._source(item)) is not None:
            return same_views(self._graph, *found)
        with self._graph.inserting_before(reader):
            cast = self._graph.call_function(CAST, (item,), {"dtype": self._narrow})
        cast.meta = {name: reader.meta[name] for name in (PARTITIONER_TAG, "stack_trace") if name in reader.meta}
        cast.meta["val"] = item.meta["val"].to(self._narrow)
        return cast


def _replaced(arguments: Any, narrowed: dict[fx.Node, fx.Node]) -> Any:
    return fx.map_arg(arguments, lambda item: narrowed.get(item, item))


def _is_wide(node: fx.Node) -> bool:
    """Whether a node gives one tensor of single precision; a lone number takes the type of what it meets."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == WIDE and value.ndim > 0


def _wide_inputs(node: fx.Node) -> list[fx.Node]:
    return [item for item in node.all_input_nodes if _is_wide(item)]
