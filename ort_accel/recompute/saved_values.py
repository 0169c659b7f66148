"""The stash: what the forward keeps for the backward, each piece of memory counted once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from ort_accel.graph.symbolic_sizes import hinted_bytes
from ort_accel.recompute.joint_graph import Bytes, backward_nodes, bytes_of, is_tensor, owner


@dataclass(frozen=True)
class Kept:
    """A value that the forward computes and the backward reads."""

    node: fx.Node
    """The node that owns the memory; the backward may read views of it."""

    @property
    def bytes(self) -> Bytes:
        """Its bytes, with Dynamo's symbols where sizes can change."""
        return bytes_of(self.node.meta["val"])

    @property
    def hint(self) -> int:
        """Its bytes at the sizes that the graph was captured with."""
        return hinted_bytes(self.node.meta["val"])

    @property
    def shape(self) -> str:
        """Its type and sizes for people: `float32[8, 128, 384]`."""
        value = self.node.meta["val"]
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def stash(joint: fx.Graph) -> list[Kept]:
    """What a joint graph keeps as it is, in order of computation. Inputs and parameters are alive anyway."""
    backward = set(backward_nodes(joint))
    return list(_kept(joint, backward))


def _kept(graph: fx.Graph, backward: set[fx.Node]) -> Iterable[Kept]:
    read = {
        owner(argument)
        for node in backward
        for argument in node.all_input_nodes
        if argument not in backward and is_tensor(argument)
    }
    return (Kept(node) for node in graph.nodes if node in read and node.op == "call_function" and is_tensor(node))


def total(kept: Iterable[Kept]) -> int:
    """Bytes of several values at the sizes that the graph was captured with."""
    return sum(item.hint for item in kept)
