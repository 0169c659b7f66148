"""Calls `ort_accel`'s attention in place of PyTorch's fused CPU attention.

Values are unknown at capture, so transformers builds every mask as a tensor, and repeats keys and values for each head.

1. A mask made by `where(condition, 0, -inf)` is replaced by its condition.
2. Keys and values that heads share (GQA) are passed unrepeated, so that they are neither copied nor saved, and their
   gradients need no sum over heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from ort_accel.graph.nodes import is_getitem
from ort_accel.graph.symbolic_sizes import known_equal, same_shape
from ort_accel.kernels.attention_precision import FLASH_BACKWARD, FLASH_FORWARD
from ort_accel.kernels.attention_slim import SLIM_BACKWARD, SLIM_FORWARD
from ort_accel.passes.options import PassOptions

aten = torch.ops.aten

RESHAPED = {aten._unsafe_view.default, aten.view.default, aten.reshape.default}


@dataclass
class _Found:
    """A fused attention in a graph, with its backward if the graph has it."""

    forward: fx.Node
    backward: fx.Node | None
    key: fx.Node
    value: fx.Node
    mask: Argument
    """True where a query attends to a key, or numbers to add to the scores; None without a mask."""
    is_causal: Argument
    sums: dict[int, list[fx.Node]]
    """The nodes that sum a result of the backward over heads that share a key, by the result's position."""


def replace_attention(graph: fx.Graph, _: PassOptions) -> int:
    """Replace attention, without needless masks and repeated keys; returns how often."""
    nodes = graph.find_nodes(op="call_function", target=FLASH_FORWARD)
    found = [attention for node in nodes if (attention := _find(node))]
    for attention in found:
        _replace(graph, attention)
    return len(found)


def _find(node: fx.Node) -> _Found | None:
    arguments = _arguments(node)
    if arguments["dropout_p"] != 0:
        return None
    mask = _condition(arguments["attn_mask"]) or arguments["attn_mask"]
    backward = _backward_of(node)
    repeated_key, repeated_value = arguments["key"], arguments["value"]
    assert isinstance(repeated_key, fx.Node)
    assert isinstance(repeated_value, fx.Node)
    found = _Found(node, backward, repeated_key, repeated_value, mask, arguments["is_causal"], {})
    key, value = _unrepeated(repeated_key), _unrepeated(repeated_value)
    if key is None or value is None or not same_shape(_heads(key), _heads(value)):
        return found
    sums = {} if backward is None else {at: _sum_of(backward, at, of) for at, of in ((1, key), (2, value))}
    if all(chain is not None for chain in sums.values()):
        found.key, found.value, found.sums = key, value, {at: chain or [] for at, chain in sums.items()}
    return found


def _heads(node: fx.Node) -> Sequence[int | torch.SymInt]:
    sizes: Sequence[int | torch.SymInt] = node.meta["val"].shape
    return sizes[:2]


def _arguments(node: fx.Node) -> dict[str, Argument]:
    """Returns the arguments of an operator by name, defaults included."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(schema, node.args, strict=False)} | node.kwargs


def _condition(mask: Argument) -> fx.Node | None:
    """Returns the condition of a mask `where(condition, 0, -inf)`; None for any other mask."""
    if not isinstance(mask, fx.Node) or mask.target is not aten.where.self:
        return None
    condition, shown, hidden = mask.args
    if _fill_value(shown) != 0 or _fill_value(hidden) != -torch.inf or not isinstance(condition, fx.Node):
        return None
    same = same_shape(condition.meta["val"].shape, mask.meta["val"].shape)
    return condition if same and condition.meta["val"].dtype == torch.bool else None


def _fill_value(node: Argument) -> Argument:
    """Returns the number that all elements of a tensor equal; None if it is unknown."""
    if isinstance(node, fx.Node) and node.target is aten.scalar_tensor.default:
        return node.args[0]
    if isinstance(node, fx.Node) and node.target is aten.full.default:
        return node.args[1]
    return None


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """Returns the keys before `repeat_kv`; None if they were not repeated."""
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
    sums = [part for part in node.users if is_getitem(part) and part.args[1] == 1]
    readers = [user for part in sums for user in part.users if user.target is FLASH_BACKWARD]
    return readers[0] if readers else None


def _sum_of(backward: fx.Node, position: int, source: fx.Node) -> list[fx.Node] | None:
    """Returns the nodes that sum a gradient over heads that share a key; None if another node reads the gradient."""
    parts = [part for part in backward.users if is_getitem(part) and part.args[1] == position]
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
    masking = (found.mask, found.is_causal, _arguments(forward)["scale"])
    _put(graph, forward, SLIM_FORWARD.default, (forward.args[0], found.key, found.value, *masking))
    if backward is None:
        return
    grad, query, _, _, *results = backward.args[:6]
    arguments = (grad, query, found.key, found.value, *results, *masking)
    for part in _put(graph, backward, SLIM_BACKWARD.default, arguments):
        position = part.args[1]
        assert isinstance(position, int)
        if chain := found.sums.get(position):
            chain[-1].replace_all_uses_with(part)
            for step in reversed(chain):
                graph.erase_node(step)


def _put(graph: fx.Graph, node: fx.Node, target: OpOverload, arguments: tuple[Argument, ...]) -> list[fx.Node]:
    """Call an operator in place of a node; returns the nodes that take its results."""
    with graph.inserting_before(node):
        new = graph.call_function(target, arguments)
    values = fx.map_arg(arguments, lambda argument: argument.meta["val"])
    new.meta = {**node.meta, "val": target(*values)}
    node.replace_all_uses_with(new)
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for source in inputs:
        _erase_dead(graph, source)
    parts = [user for user in new.users if is_getitem(user)]
    for part in parts:
        part.meta["val"] = new.meta["val"][part.args[1]]
    return parts


def _erase_dead(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that no node reads, and then its inputs that no other node reads."""
    if node.op != "call_function" or node.users:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for source in inputs:
        _erase_dead(graph, source)
