"""Replaces PyTorch's fused attention for the CPU where a captured graph carries more than a step needs.

While a model is captured, nobody can look at values. So transformers writes every mask as a tensor there, and keys and
values once for each head that reads them. This pass hands the kernel the condition that a mask was made from, and keys
that groups of heads share: these are neither copied, nor kept for the backward, nor summed up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ort_accel.graph.nodes import is_part
from ort_accel.graph.symbolic_sizes import known_equal, same_shape
from ort_accel.kernels.attention_precision import BACKWARD, FORWARD
from ort_accel.kernels.attention_slim import LEAN_BACKWARD, LEAN_FORWARD

aten = torch.ops.aten

RESHAPED = {aten._unsafe_view.default, aten.view.default, aten.reshape.default}


@dataclass
class _Found:
    """A fused attention in a graph, with its gradient where that is in the graph, too."""

    forward: fx.Node
    backward: fx.Node | None
    key: fx.Node
    value: fx.Node
    allowed: fx.Node | None
    is_causal: bool
    sums: dict[int, list[fx.Node]]
    """By the position of a result of the backward, what sums it up over the heads that share a key."""

    @property
    def is_lean(self) -> bool:
        """Whether there is nothing to leave out."""
        return self.allowed is None and (self.key, self.value) == self.forward.args[1:3]


def slim_attention(graph: fx.Graph) -> int:
    """Leave out repeated keys and masks known in a step only; returns for how many kernels."""
    nodes = graph.find_nodes(op="call_function", target=FORWARD)
    found = [attention for node in nodes if (attention := _find(node)) and not attention.is_lean]
    for attention in found:
        _replace(graph, attention)
    return len(found)


def _find(node: fx.Node) -> _Found | None:
    given = _arguments(node)
    if given["dropout_p"] != 0:
        return None
    mask, allowed = given["attn_mask"], None
    if mask is not None and (allowed := _condition(mask)) is None:
        return None
    backward = _backward_of(node)
    is_causal = given["is_causal"]
    found = _Found(node, backward, given["key"], given["value"], allowed, is_causal, {})
    key, value = _unrepeated(given["key"]), _unrepeated(given["value"])
    if key is None or value is None or not same_shape(_heads(key), _heads(value)):
        return found
    sums = {} if backward is None else {at: _sum_of(backward, at, of) for at, of in ((1, key), (2, value))}
    if all(chain is not None for chain in sums.values()):
        found.key, found.value, found.sums = key, value, {at: chain or [] for at, chain in sums.items()}
    return found


def _heads(node: fx.Node) -> Sequence[Any]:
    sizes: Sequence[Any] = node.meta["val"].shape
    return sizes[:2]


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name, with their defaults."""
    names = node.target._schema.arguments  # type: ignore[union-attr]
    known = {argument.name: argument.default_value for argument in names if argument.has_default_value()}
    return known | {argument.name: value for argument, value in zip(names, node.args, strict=False)} | node.kwargs


def _condition(mask: fx.Node) -> fx.Node | None:
    """What a mask of zeros, and of minus infinity where a key is hidden, was made from."""
    if mask.target is not aten.where.self:
        return None
    condition, shown, hidden = mask.args
    if _number(shown) != 0 or _number(hidden) != -torch.inf or not isinstance(condition, fx.Node):
        return None
    same = same_shape(condition.meta["val"].shape, mask.meta["val"].shape)
    return condition if same and condition.meta["val"].dtype == torch.bool else None


def _number(node: Any) -> Any:
    """The number that every element of a tensor is; None where it is not known."""
    if isinstance(node, fx.Node) and node.target is aten.scalar_tensor.default:
        return node.args[0]
    if isinstance(node, fx.Node) and node.target is aten.full.default:
        return node.args[1]
    return None


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """Keys before each of their heads was repeated for those that share it."""
    sizes = node.meta["val"].shape
    shaped = node if node.target in RESHAPED else None
    copied = shaped and shaped.all_input_nodes[0]
    if copied is not None and copied.target is aten.clone.default:  # of a single head there is no copy
        copied = copied.all_input_nodes[0]
    spread = copied.all_input_nodes[0] if copied is not None and copied.target is aten.expand.default else None
    if spread is None or spread.target is not aten.unsqueeze.default or spread.args[1] not in (2, -3):
        return None
    source = spread.all_input_nodes[0]
    before = source.meta["val"].shape
    is_same = len(before) == len(sizes) == 4 and all(known_equal(sizes[dim], before[dim]) for dim in (0, 2, 3))
    return source if is_same else None


def _backward_of(node: fx.Node) -> fx.Node | None:
    sums = [part for part in node.users if is_part(part) and part.args[1] == 1]
    readers = [user for part in sums for user in part.users if user.target is BACKWARD]
    return readers[0] if readers else None


def _sum_of(backward: fx.Node, position: int, source: fx.Node) -> list[fx.Node] | None:
    """What sums a gradient up over heads that share a key, first to last; None where something else reads it."""
    parts = [part for part in backward.users if is_part(part) and part.args[1] == position]
    if not parts or not parts[0].users:
        return []
    steps: Sequence[Callable[[fx.Node], bool]] = (
        lambda step: step.target in RESHAPED,
        lambda step: step.target is aten.sum.dim_IntList and step.args[1:] == ([2], True),
        lambda step: step.target in {aten.squeeze.dim, aten.squeeze.dims} and step.args[1] in (2, [2]),
    )
    chain, node = [], parts[0]
    for fits in steps:
        if len(node.users) != 1 or not fits(node := next(iter(node.users))):
            return None
        chain.append(node)
    fits_source = same_shape(node.meta["val"].shape, source.meta["val"].shape)
    return chain if len(parts) == 1 and fits_source else None


def _replace(graph: fx.Graph, found: _Found) -> None:
    forward, backward = found.forward, found.backward
    given = _arguments(forward)
    masking = (found.allowed, found.is_causal, given["scale"])
    _put(graph, forward, LEAN_FORWARD.default, (forward.args[0], found.key, found.value, *masking))
    if backward is None:
        return
    grad, query, _, _, *results = backward.args[:6]
    arguments = (grad, query, found.key, found.value, *results, *masking)
    for part in _put(graph, backward, LEAN_BACKWARD.default, arguments):
        if chain := found.sums.get(part.args[1]):  # type: ignore[arg-type]
            chain[-1].replace_all_uses_with(part)
            for step in reversed(chain):
                graph.erase_node(step)


def _put(graph: fx.Graph, node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> list[fx.Node]:
    """Call an operator in place of a node; returns the nodes that take its results."""
    with graph.inserting_before(node):
        new = graph.call_function(target, arguments)
    values = fx.map_arg(arguments, lambda argument: argument.meta["val"])
    new.meta = {**node.meta, "val": target(*values)}
    node.replace_all_uses_with(new)
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for source in inputs:
        _erase_unread(graph, source)
    parts = [user for user in new.users if is_part(user)]
    for part in parts:
        part.meta["val"] = new.meta["val"][part.args[1]]
    return parts


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """What repeated keys and made masks, where nothing reads it any more."""
    if node.op != "call_function" or node.users:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for source in inputs:
        _erase_unread(graph, source)
