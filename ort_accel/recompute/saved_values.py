"""Saved values: tensors that the forward computes and the backward reads. Each storage counts once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from ort_accel.graph.symbolic_sizes import hinted_bytes
from ort_accel.recompute.joint_graph import backward_nodes, is_tensor, storage_owner, symbolic_bytes


@dataclass(frozen=True)
class SavedValue:
    """A value that the forward computes and the backward reads."""

    node: fx.Node
    """The node that owns the storage; the backward may read views of it."""

    @property
    def value(self) -> torch.Tensor:
        """The fake tensor of the node."""
        value: torch.Tensor = self.node.meta["val"]
        return value

    @property
    def symbolic_bytes(self) -> int | sympy.Expr:
        """Its bytes, as an expression if sizes can change."""
        return symbolic_bytes(self.value)

    @property
    def bytes(self) -> int:
        """Its bytes at the captured sizes."""
        return hinted_bytes(self.value)

    @property
    def shape(self) -> str:
        """Its type and sizes as text: `float32[8, 128, 384]`."""
        return f"{str(self.value.dtype).removeprefix('torch.')}[{', '.join(map(str, self.value.shape))}]"


def saved_values(joint: fx.Graph) -> list[SavedValue]:
    """Returns the saved values of a joint graph, in order. Inputs and parameters are not among them."""
    backward = set(backward_nodes(joint))
    read = {
        storage_owner(argument)
        for node in backward
        for argument in node.all_input_nodes
        if argument not in backward and is_tensor(argument)
    }
    return [SavedValue(node) for node in joint.nodes if node in read and node.op == "call_function" and is_tensor(node)]


def total_bytes(values: Iterable[SavedValue]) -> int:
    """Returns the bytes of several values at the captured sizes."""
    return sum(item.bytes for item in values)
