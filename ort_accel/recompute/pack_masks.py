"""Masks that are kept for the backward with eight elements in a byte.

What dropout keeps cannot be computed again, and takes a byte for each element where one bit says it. Packing a mask and
taking it out again takes a small part of the time that drawing it does, and gives the same mask.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from ort_accel.graph.memory_layout import is_plain
from ort_accel.graph.nodes import bytes_made, depends_on_data, half_of, is_size, returned, size_arguments
from ort_accel.kernels.bit_mask import is_of_bits, own
from ort_accel.recompute.cost import milliseconds
from ort_accel.recompute.joint_graph import backward_nodes, is_tensor, owner
from ort_accel.recompute.saved_values import stash

LEAST_BYTES = 1 << 16
"""Smaller masks stay as they are: calling the two operators takes longer than their memory is worth."""


def has_masks(joint: fx.Graph) -> bool:
    """Whether a joint graph keeps a mask that may be kept as bits."""
    return bool(_large_masks(joint))


def packed(joint: fx.Graph) -> tuple[int, int]:
    """How many bytes of bits a joint graph keeps, and how many the masks would take."""
    nodes = joint.find_nodes(op="call_function", target=own.to_bits.default)
    return sum(map(bytes_made, nodes)), sum(bytes_made(node.all_input_nodes[0]) for node in nodes)


def packing_ms(graphs: Iterable[fx.GraphModule]) -> float:
    """The milliseconds that packing masks and taking them out takes in a step, as the cost model has it."""
    return sum(milliseconds(node) for module in graphs for node in module.graph.nodes if is_of_bits(node))


def keep_bits(joint: fx.Graph, wanted: int) -> None:
    """Let the forward keep the bits of masks, and the backward make each mask anew for its first reader. The first
    `wanted` outputs are the caller's and stay."""
    backward = {node: place for place, node in enumerate(backward_nodes(joint))}
    given = {owner(node) for node in returned(joint)[:wanted] if isinstance(node, fx.Node)}
    kept_as_it_is = given | _shown(backward)
    for mask in [mask for mask in _large_masks(joint) if mask not in kept_as_it_is]:
        readers = [user for user in mask.users if user in backward and not is_size(user)]
        first = min(readers, key=backward.__getitem__)
        with joint.inserting_before(mask.next):
            sizes = size_arguments(joint, mask, mask.meta["val"].shape)
            bits = _called(joint, own.to_bits.default, mask, f"{mask.name}_bits", mask)
        with joint.inserting_before(first):
            again = _called(joint, own.from_bits.default, first, f"{mask.name}_again", bits, sizes)
        for reader in readers:
            reader.replace_input_with(mask, again)


def _large_masks(joint: fx.Graph) -> list[fx.Node]:
    return [kept.node for kept in stash(joint) if kept.hint >= LEAST_BYTES and _is_mask(kept.node)]


def _shown(backward: Collection[fx.Node]) -> set[fx.Node]:
    """What the backward reads through views of the forward: it is kept as it lies in memory."""
    read = {item for node in backward for item in node.all_input_nodes if item not in backward and is_tensor(item)}
    return {owner(item) for item in read if owner(item) is not item}


def _is_mask(node: fx.Node) -> bool:
    value = node.meta["val"]
    is_bool_on_cpu = value.dtype == torch.bool and value.device.type == "cpu"
    return is_bool_on_cpu and is_plain(value) and not depends_on_data(node)


def _called(joint: fx.Graph, target: Any, beside: fx.Node, name: str, *args: Any) -> fx.Node:
    """A call that belongs to the half of the step to which another node belongs."""
    node = joint.create_node("call_function", target, args, {}, name)
    node.meta = {"val": target(*fx.map_arg(args, lambda item: item.meta["val"]))} | half_of(beside)
    if trace := beside.meta.get("stack_trace"):
        node.meta["stack_trace"] = trace
    return node
