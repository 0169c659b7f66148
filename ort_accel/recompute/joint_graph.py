"""Structure of a joint graph: its two passes, storage owners, value sizes and recomputable nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import mul

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from ort_accel.graph.meta_keys import PARTITIONER_TAG
from ort_accel.graph.nodes import is_data_dependent, is_getitem, is_random, is_size, is_view, returned, writes
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.operators.facts import facts


def backward_nodes(joint: fx.Graph) -> list[fx.Node]:
    """Returns the nodes after the last one that the partitioner tags as forward."""
    nodes = list(joint.nodes)
    ends = [index for index, node in enumerate(nodes) if node.meta.get(PARTITIONER_TAG) == "is_forward"]
    first = max(ends, default=-1) + 1
    return [node for node in nodes[first:] if node.op == "call_function"]


def forward_nodes(joint: fx.Graph) -> list[fx.Node]:
    """Returns the nodes that the forward runs, in order."""
    backward = set(backward_nodes(joint))
    return [node for node in joint.nodes if node.op == "call_function" and node not in backward]


def packet(node: fx.Node) -> object:
    """Returns the operator of a node without its overload; None if it has none."""
    return getattr(node.target, "overloadpacket", None)


def producer(node: fx.Node) -> fx.Node:
    """Returns the operator that computes a value; for one of several outputs, the operator that computes them all."""
    while is_getitem(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def storage_owner(node: fx.Node) -> fx.Node:
    """Returns the value whose storage a view reads; a value that is no view owns its storage."""
    while True:
        if is_getitem(node):
            source = producer(node)
            if not is_view(source):
                return node
            node = source
        if not is_view(node):
            return node
        node = node.all_input_nodes[0]


def output_owners(graph: fx.Graph, num_outputs: int) -> set[fx.Node]:
    """Returns the storage owners of the first outputs, which the caller receives."""
    return {storage_owner(node) for node in returned(graph)[:num_outputs] if isinstance(node, fx.Node)}


def is_unchanged_input(node: fx.Node) -> bool:
    """True if a value is an input, or a view of one, that the forward does not write to."""
    base = storage_owner(node)
    return base.op == "placeholder" and not any(writes(user) and user.args[0] is base for user in base.users)


def is_tensor(node: fx.Node) -> bool:
    """True if the value of a node is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_recomputable(node: fx.Node) -> bool:
    """True if a second run of a node has the same result and no side effect."""
    target = node.target
    if is_getitem(node):
        return is_recomputable(producer(node))
    if node.op != "call_function" or not isinstance(target, OpOverload) or is_size(node):
        return False
    is_repeatable = target.namespace == "ort_accel" and facts(node).repeat is not None
    is_known = target.namespace in ("aten", "prims") or is_repeatable
    if not is_known or is_random(node) or writes(node):
        return False
    return not is_data_dependent(node)


def symbolic_bytes(fake: torch.Tensor) -> int | sympy.Expr:
    """Returns the bytes of a tensor, as an expression if its sizes can change."""
    sizes = [expression(size) for size in fake.shape]
    return reduce(mul, sizes, fake.element_size())


def insert_call(graph: fx.Graph, target: OpOverload, name: str, meta: Mapping[str, object], *args: Argument) -> fx.Node:
    """Insert a call at the current position; its fake value is computed from those of its arguments."""
    node = graph.create_node("call_function", target, args, {}, name)
    node.meta = {**meta, "val": target(*fx.map_arg(args, lambda item: item.meta["val"]))}
    return node


def tensor_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Returns the inputs of a node that are no sizes."""
    return (item for item in node.all_input_nodes if not is_size(item))
