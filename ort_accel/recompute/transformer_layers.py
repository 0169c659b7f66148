"""Where the layers of a transformer begin: at a norm whose stream goes round an attention and is added again.

Pre-norm models add what the norm reads, post-norm models what it gives. Both are found by the same question: does a sum
add the norm's input or output to something that came through an attention fed by this norm?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ort_accel.graph.nodes import is_part, is_view
from ort_accel.kernels.packed_rows import own
from ort_accel.recompute.joint_graph import is_tensor, owner, whole

aten = torch.ops.aten

WHOLE_NORMS = {aten.native_layer_norm, aten._fused_rms_norm, aten.rms_norm}
SUMS = {aten.add}
SOFTMAXES = {aten._softmax, aten._safe_softmax}
STEPS = {aten._to_copy, aten.clone, aten.native_dropout_backward, own.rows_of, own.rows_into, aten.index_select}
"""What a stream passes through between a norm and a sum, besides views; dropout is written as the second where it drops
nothing, and as the third where it does, the others leave out rows that do not count and put them back."""
_MOST_USERS = 16


@dataclass(frozen=True)
class Layers:
    """The boundaries of a model's layers."""

    starts: list[fx.Node]
    """What the norm at the beginning of each layer reads, in order. These values are kept."""
    end: fx.Node | None
    """What the last norm behind all layers reads; what follows is needed as soon as the backward begins."""

    @property
    def kept(self) -> set[fx.Node]:
        """Values at boundaries, which are kept."""
        return {*self.starts, *([self.end] if self.end is not None else [])}


@dataclass(frozen=True)
class _Norm:
    read: fx.Node
    given: fx.Node


def find_layers(forward: Sequence[fx.Node]) -> Layers:
    """The layers of a forward graph; none where it has no attention with norms around it."""
    norms = [norm for norm in map(_norm, forward) if norm is not None]
    attentions = [node for node in forward if _is_attention(node)]
    if not norms or not attentions:
        return Layers([], None)
    behind_norm = _reached(forward, [norm.given for norm in norms])
    behind_attention = _reached(forward, attentions)
    fed_by = [behind_norm[node] for node in attentions]

    def begins_layer(index: int) -> bool:
        fed = sum(1 << place for place, norms_above in enumerate(fed_by) if norms_above >> index & 1)
        around = fed & ~behind_attention[norms[index].given]
        sums = _sums_of(norms[index].read) + _sums_of(norms[index].given)
        return any(behind_attention.get(other, 0) & around for other in sums)

    starts = dict.fromkeys(owner(norm.read) for index, norm in enumerate(norms) if begins_layer(index))
    place = {node: index for index, node in enumerate(forward)}
    last = norms[-1]
    is_behind = place[last.given] > place[attentions[-1]]
    end = owner(last.read) if is_behind and owner(last.read) not in starts else None
    return Layers([node for node in starts if node.op == "call_function"], end)


def _norm(node: fx.Node) -> _Norm | None:
    """The norm that this node completes: one operator, or the root mean square written out."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in WHOLE_NORMS:
        given = next((user for user in node.users if is_part(user) and user.args[1] == 0), node)
        return _Norm(_source(node.args[0]), given)
    if packet is not aten.mul or not any(_is_root(item) for item in node.all_input_nodes):
        return None
    read = next((item for item in node.all_input_nodes if not _is_root(item)), None)
    return _Norm(_source(read), node) if read is not None else None


def _is_root(node: fx.Node) -> bool:
    """Whether a node is the reciprocal root of a mean of squares."""
    for packet in (aten.rsqrt, aten.add, aten.mean):
        if getattr(node.target, "overloadpacket", None) is not packet:
            return False
        node = node.all_input_nodes[0]
    return True


def _source(node: object) -> fx.Node:
    """A value before it was cast."""
    assert isinstance(node, fx.Node)
    while getattr(node.target, "overloadpacket", None) is aten._to_copy:
        node = node.all_input_nodes[0]
    return node


def _is_attention(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in SOFTMAXES:
        return is_tensor(node) and node.meta["val"].ndim >= 3
    return "scaled_dot_product" in str(node.target)


def _sums_of(node: fx.Node) -> list[fx.Node]:
    """What a value, seen through views, casts and dropout, is added to."""
    others: list[fx.Node] = []
    pending = list(node.users)[:_MOST_USERS]
    seen: set[fx.Node] = {node}
    while pending:
        user = pending.pop()
        packet = getattr(user.target, "overloadpacket", None)
        if packet in SUMS:
            others += [item for item in user.all_input_nodes if item not in seen]
        elif (is_view(user) or packet in STEPS) and user not in seen:
            seen.add(user)
            pending += list(user.users)[:_MOST_USERS]
    return others


def _reached(forward: Sequence[fx.Node], sources: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For every node, as bits: which of the sources it is or depends on."""
    bits = {node: 1 << index for index, node in enumerate(sources)}
    found: dict[fx.Node, int] = {}
    for node in forward:
        reached = bits.get(node, 0)
        for item in node.all_input_nodes:
            reached |= found.get(item, 0)
        found[node] = reached
    return found


def region(forward: Sequence[fx.Node], layers: Layers) -> dict[fx.Node, int]:
    """The layer of every operator, counted from 0 for what comes before the first; the head comes after all of them."""
    starts = {start: index for index, start in enumerate(layers.starts, 1)}
    now, found = 0, {}
    for node in forward:
        found[node] = now
        now = starts.get(node, now)
        if node is layers.end:
            now = len(layers.starts) + 1
    return {node: found[whole(node)] if is_part(node) else place for node, place in found.items()}
