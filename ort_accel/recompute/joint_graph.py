"""What recomputation asks of a joint graph: its two halves, what owns memory, and how large values are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import mul
from typing import Any

import torch
from torch import fx

from ort_accel.graph.nodes import depends_on_data, is_part, is_random, is_size, is_view, writes
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.kernels.attention_slim import LEAN
from ort_accel.kernels.packed_rows import ON_ROWS

Bytes = Any
"""A number of bytes: an int, or a sympy expression where sizes can change."""


def backward_nodes(joint: fx.Graph) -> list[fx.Node]:
    """The nodes behind the last one of the forward, as the partition sees it."""
    nodes = list(joint.nodes)
    ends = [index for index, node in enumerate(nodes) if node.meta.get("partitioner_tag") == "is_forward"]
    first = max(ends, default=-1) + 1
    return [node for node in nodes[first:] if node.op == "call_function"]


def forward_nodes(joint: fx.Graph) -> list[fx.Node]:
    """What the forward computes, in order."""
    backward = set(backward_nodes(joint))
    return [node for node in joint.nodes if node.op == "call_function" and node not in backward]


def whole(node: fx.Node) -> fx.Node:
    """The operator that makes a value: for one of several outputs, the node that makes them all."""
    while is_part(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def owner(node: fx.Node) -> fx.Node:
    """The value whose memory a view looks at; a value that is no view owns its memory."""
    while True:
        if is_part(node):
            source = whole(node)
            if not is_view(source):
                return node
            node = source
        if not is_view(node):
            return node
        node = node.all_input_nodes[0]


def is_lasting(node: fx.Node) -> bool:
    """Whether a value is an input, or a view of one, that the backward finds as the forward did.

    An input that the forward changes, such as a running mean, holds another value by then.
    """
    base = owner(node)
    return base.op == "placeholder" and not any(writes(user) and user.args[0] is base for user in base.users)


def is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def can_be_repeated(node: fx.Node) -> bool:
    """Whether running a node twice gives the same and does nothing else: no draw, no write, no operator of others."""
    target = node.target
    if is_part(node):
        return can_be_repeated(whole(node))
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or is_size(node):
        return False
    is_known = target.namespace in ("aten", "prims") or target.overloadpacket in ON_ROWS | LEAN
    if not is_known or is_random(node) or writes(node):
        return False
    return not depends_on_data(node)


def bytes_of(fake: torch.Tensor) -> Bytes:
    """The bytes of a tensor, as an expression where its sizes can change."""
    sizes = [expression(size) for size in fake.shape]
    return reduce(mul, sizes, fake.element_size())


def inputs_of(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a node reads."""
    return (item for item in node.all_input_nodes if not is_size(item))
