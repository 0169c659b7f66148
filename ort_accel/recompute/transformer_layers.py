"""Finds the layers of a transformer in a forward graph.

A layer begins at a norm around an attention with a residual connection. A pre-norm model adds the norm's input to the
attention's result, a post-norm model adds the norm's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ort_accel.graph.nodes import is_getitem, is_view
from ort_accel.kernels.packed_rows import own
from ort_accel.recompute.joint_graph import is_tensor, packet, producer, storage_owner

aten = torch.ops.aten

FUSED_NORMS = {aten.native_layer_norm, aten._fused_rms_norm, aten.rms_norm, own.rms_norm}
SOFTMAXES = {aten._softmax, aten._safe_softmax}
PASS_THROUGH = {aten._to_copy, aten.clone, aten.native_dropout_backward, own.rows_of, own.rows_into, aten.index_select}
"""Operators, besides views, between a norm and the addition of a residual: casts, dropout and row selections. Dropout
is a clone if it drops nothing."""
_MOST_USERS = 16


@dataclass(frozen=True)
class Layers:
    """The borders of a model's layers."""

    starts: list[fx.Node]
    """The input of the first norm of each layer, in order."""
    end: fx.Node | None
    """The input of the last norm after all layers. The backward reads later values at once."""

    @property
    def borders(self) -> set[fx.Node]:
        """The values between layers, which are saved."""
        return {*self.starts, *([self.end] if self.end is not None else [])}


@dataclass(frozen=True)
class _Norm:
    input: fx.Node
    output: fx.Node


def find_layers(forward: Sequence[fx.Node]) -> Layers:
    """Returns the layers of a forward graph; none if it has no attention with norms around it."""
    norms = [norm for norm in map(_norm, forward) if norm is not None]
    attentions = [node for node in forward if _is_attention(node)]
    if not norms or not attentions:
        return Layers([], None)
    norms_above = _sources_above(forward, [norm.output for norm in norms])
    attentions_above = _sources_above(forward, attentions)
    norms_above_attention = [norms_above[node] for node in attentions]

    def begins_layer(index: int) -> bool:
        fed = sum(1 << place for place, above in enumerate(norms_above_attention) if above >> index & 1)
        after_norm = fed & ~attentions_above[norms[index].output]
        addends = _addends(norms[index].input) + _addends(norms[index].output)
        return any(attentions_above.get(addend, 0) & after_norm for addend in addends)

    starts = dict.fromkeys(storage_owner(norm.input) for index, norm in enumerate(norms) if begins_layer(index))
    position = {node: index for index, node in enumerate(forward)}
    last = norms[-1]
    is_after = position[last.output] > position[attentions[-1]]
    end = storage_owner(last.input) if is_after and storage_owner(last.input) not in starts else None
    return Layers([node for node in starts if node.op == "call_function"], end)


def _norm(node: fx.Node) -> _Norm | None:
    """Returns the norm that this node completes: a fused operator, or the last product of an RMS norm."""
    if packet(node) in FUSED_NORMS:
        output = next((user for user in node.users if is_getitem(user) and user.args[1] == 0), node)
        return _Norm(_before_cast(node.args[0]), output)
    if packet(node) is not aten.mul or not any(_is_reciprocal_rms(item) for item in node.all_input_nodes):
        return None
    read = next((item for item in node.all_input_nodes if not _is_reciprocal_rms(item)), None)
    return _Norm(_before_cast(read), node) if read is not None else None


def _is_reciprocal_rms(node: fx.Node) -> bool:
    """True if a node is the reciprocal square root of a mean."""
    for operator in (aten.rsqrt, aten.add, aten.mean):
        if packet(node) is not operator:
            return False
        node = node.all_input_nodes[0]
    return True


def _before_cast(node: object) -> fx.Node:
    assert isinstance(node, fx.Node)
    while packet(node) is aten._to_copy:
        node = node.all_input_nodes[0]
    return node


def _is_attention(node: fx.Node) -> bool:
    if packet(node) in SOFTMAXES:
        return is_tensor(node) and bool(node.meta["val"].ndim >= 3)
    return "scaled_dot_product" in str(node.target)


def _addends(node: fx.Node) -> list[fx.Node]:
    """Returns the values that a value is added to, seen through views, casts and dropout."""
    others: list[fx.Node] = []
    pending = list(node.users)[:_MOST_USERS]
    seen: set[fx.Node] = {node}
    while pending:
        user = pending.pop()
        if packet(user) is aten.add:
            others += [item for item in user.all_input_nodes if item not in seen]
        elif (is_view(user) or packet(user) in PASS_THROUGH) and user not in seen:
            seen.add(user)
            pending += list(user.users)[:_MOST_USERS]
    return others


def _sources_above(forward: Sequence[fx.Node], sources: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Returns, for every node, a bit set of the sources that it is or depends on."""
    bits = {node: 1 << index for index, node in enumerate(sources)}
    found: dict[fx.Node, int] = {}
    for node in forward:
        above = bits.get(node, 0)
        for item in node.all_input_nodes:
            above |= found.get(item, 0)
        found[node] = above
    return found


def layer_indices(forward: Sequence[fx.Node], layers: Layers) -> dict[fx.Node, int]:
    """Returns the layer of every node: 0 before the first layer, and one more than the last after all layers."""
    starts = {start: index for index, start in enumerate(layers.starts, 1)}
    now, found = 0, {}
    for node in forward:
        found[node] = now
        now = starts.get(node, now)
        if node is layers.end:
            now = len(layers.starts) + 1
    return {node: found[producer(node)] if is_getitem(node) else index for node, index in found.items()}
