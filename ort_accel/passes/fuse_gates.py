"""Replaces an activation and its product with another tensor by one operator (`kernels/gated.py`), in single precision.

It runs before autograd, on the graph that Dynamo captured, so that the gradients are one operator, too.
"""

from __future__ import annotations

from torch import fx
from torch.fx.node import Argument

from ort_accel.graph.memory_layout import is_plain
from ort_accel.graph.symbolic_sizes import same_shape
from ort_accel.kernels.gated import APPROXIMATIONS, gated
from ort_accel.passes.common import (
    example_of,
    fuse_each,
    has_one_reader,
    is_named,
    is_single,
    operands_of,
)
from ort_accel.passes.options import PassOptions


def fuse_gates(graph: fx.Graph, _: PassOptions) -> int:
    """Fuse each gate; returns how many."""
    return fuse_each(graph, _gate, gated, ("mul", "silu", "gelu"))


def _gate(node: fx.Node) -> tuple[fx.Node, fx.Node, str] | None:
    """Returns the gate, the other factor and the activation where a node is their product, of one shape."""
    factors = operands_of(node, "mul")
    if factors is None or not is_single(node) or not is_plain(example_of(node)):
        return None
    for activated, up in (factors, factors[::-1]):
        activation = _activation(activated)
        gate = activated.args[0] if isinstance(activated, fx.Node) and activation else None
        if activation is None or not is_single(gate) or not is_single(up):
            continue
        if all(same_shape(example_of(one).shape, example_of(node).shape) for one in (gate, up)):
            return gate, up, activation
    return None


def _activation(node: Argument) -> str | None:
    """Returns the name of an activation with one reader."""
    if not isinstance(node, fx.Node) or not has_one_reader(node) or len(node.args) != 1:
        return None
    if is_named(node, "silu") and not node.kwargs.get("inplace"):
        return "silu"
    if not is_named(node, "gelu"):
        return None
    approximation = node.kwargs.get("approximate", "none")
    return next((name for name, value in APPROXIMATIONS.items() if value == approximation), None)
