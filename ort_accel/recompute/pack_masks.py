"""Packs boolean masks into bits between forward and backward.

A dropout mask cannot be recomputed and takes a byte for each element. Packing and unpacking it costs a small part of
the time that drawing it does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from ort_accel.graph.memory_layout import is_plain
from ort_accel.graph.nodes import is_data_dependent, is_size, output_bytes, partition_tag_of, size_arguments
from ort_accel.kernels.bit_mask import is_bit_mask_op, own
from ort_accel.recompute.cost import node_ms
from ort_accel.recompute.joint_graph import backward_nodes, insert_call, is_tensor, output_owners, storage_owner
from ort_accel.recompute.saved_values import saved_values

LEAST_BYTES = 1 << 16
"""Smaller masks are not packed: launching two operators costs more than their memory is worth."""


def has_masks(joint: fx.Graph) -> bool:
    """True if a joint graph saves a mask that is worth packing."""
    return bool(_large_masks(joint))


def packed_bytes(joint: fx.Graph) -> tuple[int, int]:
    """Returns the bytes of the packed masks of a joint graph, and of the same masks unpacked."""
    nodes = joint.find_nodes(op="call_function", target=own.to_bits.default)
    return sum(map(output_bytes, nodes)), sum(output_bytes(node.all_input_nodes[0]) for node in nodes)


def packing_ms(graphs: Iterable[fx.GraphModule]) -> float:
    """Returns the milliseconds that masks are packed and unpacked for in a step, by the cost model."""
    return sum(node_ms(node) for module in graphs for node in module.graph.nodes if is_bit_mask_op(node))


def pack_masks(joint: fx.Graph, num_outputs: int) -> None:
    """Let the forward save packed masks, but for its first `num_outputs` outputs, and the backward unpack them."""
    backward = {node: position for position, node in enumerate(backward_nodes(joint))}
    excluded = output_owners(joint, num_outputs) | _read_through_views(backward)
    for mask in [mask for mask in _large_masks(joint) if mask not in excluded]:
        readers = [user for user in mask.users if user in backward and not is_size(user)]
        first = min(readers, key=backward.__getitem__)
        with joint.inserting_before(mask.next):
            sizes = size_arguments(joint, mask, mask.meta["val"].shape)
            bits = insert_call(joint, own.to_bits.default, f"{mask.name}_bits", _origin(mask), mask)
        with joint.inserting_before(first):
            unpacked = insert_call(joint, own.from_bits.default, f"{mask.name}_again", _origin(first), bits, sizes)
        for reader in readers:
            reader.replace_input_with(mask, unpacked)


def _large_masks(joint: fx.Graph) -> list[fx.Node]:
    return [value.node for value in saved_values(joint) if value.bytes >= LEAST_BYTES and _is_mask(value.node)]


def _read_through_views(backward: Collection[fx.Node]) -> set[fx.Node]:
    """Returns the forward values that the backward reads through views. They are saved in their memory layout."""
    read = {item for node in backward for item in node.all_input_nodes if item not in backward and is_tensor(item)}
    return {storage_owner(item) for item in read if storage_owner(item) is not item}


def _is_mask(node: fx.Node) -> bool:
    value = node.meta["val"]
    is_bool_on_cpu = value.dtype == torch.bool and value.device.type == "cpu"
    return is_bool_on_cpu and is_plain(value) and not is_data_dependent(node)


def _origin(node: fx.Node) -> dict[str, str]:
    """Returns the meta that says which pass and which line of the model a node belongs to."""
    trace = node.meta.get("stack_trace")
    return partition_tag_of(node) | ({"stack_trace": trace} if trace else {})
