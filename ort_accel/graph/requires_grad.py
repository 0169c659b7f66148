"""Marks which values of a forward graph have a gradient; the fake tensors of a traced graph do not tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ort_accel.graph.meta_keys import HAS_GRADIENT

_DETACH = {torch.ops.aten.detach.default, torch.ops.aten.detach_.default}


def grad_modes(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Returns for each node if gradients are recorded where it runs, in a graph that is called in the present mode."""
    modes, enabled = dict[fx.Node, bool](), torch.is_grad_enabled()
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        modes[node] = enabled
    return modes


def mark_gradients(graph: fx.Graph, inputs: Sequence[object]) -> None:
    """Marks the nodes whose values have a gradient when the graph is called with these inputs."""
    remaining, modes = iter(inputs), grad_modes(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            value = next(remaining)
            node.meta[HAS_GRADIENT] = isinstance(value, Tensor) and value.requires_grad
        elif node.target is not torch._C._set_grad_enabled:
            follows = modes[node] and node.target not in _DETACH and any(map(has_gradient, node.all_input_nodes))
            node.meta[HAS_GRADIENT] = follows and _is_floating(node.meta.get("val"))


def has_gradient(node: fx.Node) -> bool:
    """True if a node's value has a gradient."""
    return bool(node.meta.get(HAS_GRADIENT))


def is_cut_off(node: fx.Node) -> bool:
    """True if a node's inputs have gradients and its value, made under `no_grad`, has none."""
    made = not has_gradient(node) and node.target not in _DETACH and _is_floating(node.meta.get("val"))
    return made and any(map(has_gradient, node.all_input_nodes))


def _is_floating(value: object) -> bool:
    values = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(item, Tensor) and item.is_floating_point() for item in values)
