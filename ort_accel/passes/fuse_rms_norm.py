"""Replaces the operators by which models write an RMS norm by one (`kernels/rms_norm.py`), in single precision.

It runs before autograd, on the graph that Dynamo captured, so that the gradient is one operator, too.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ort_accel.kernels.rms_norm import rms_norm
from ort_accel.passes.common import changes_grad_mode, example_of, is_named, is_single, recompile, replace_steps
from ort_accel.passes.options import PassOptions


def fuse_rms_norm(graph: fx.Graph, _: PassOptions) -> int:
    """Fuse each norm; returns how many."""
    count = 0
    for node in list(graph.nodes):
        if (found := _normal(node)) is None:
            continue
        x, eps = found
        whole, weight = _times_weight(node)
        if changes_grad_mode(whole, (x, weight)):
            continue
        with graph.inserting_before(whole):
            fused = graph.call_function(rms_norm, (x, weight, eps))
        replace_steps(whole, fused, STEPS)
        count += 1
    if count:
        recompile(graph)
    return count


STEPS = ("mul", "to", "float", "type_as", "rsqrt", "add", "mean", "pow", "square")
"""Names of the operators that a norm is written with."""


def _normal(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Returns x and eps where a node is `x * rsqrt(mean(x ** 2, -1) + eps)`, and nothing else reads the steps."""
    if not is_named(node, "mul") or len(node.args) != 2 or not is_single(node):
        return None
    for x, root in (node.args, node.args[::-1]):
        if isinstance(x, fx.Node) and (eps := _epsilon(root, x)) is not None:
            return x, eps
    return None


def _epsilon(root: object, x: fx.Node) -> float | None:
    """Returns eps where a node is `rsqrt(mean(x ** 2, -1) + eps)`."""
    added = _operand(root, "rsqrt")
    mean = _operand(added, "add")
    square = _operand(mean, "mean")
    if added is None or mean is None or square is None or not _is_over_last(mean, x):
        return None
    if not _is_square(square, x) or len(added.args) != 2 or added.kwargs:
        return None
    eps = added.args[1]
    return float(eps) if isinstance(eps, int | float) else None


def _operand(node: object, name: str) -> fx.Node | None:
    """Returns the first operand of an operator with one reader; None if the node is another one."""
    if not is_named(node, name) or len(node.users) != 1:
        return None
    first = node.args[0]
    return first if isinstance(first, fx.Node) else None


def _is_over_last(mean: fx.Node, x: fx.Node) -> bool:
    given = dict(zip(("input", "dim", "keepdim"), mean.args, strict=False)) | mean.kwargs
    dim = given.get("dim")
    last = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    is_last = last in (-1, example_of(x).ndim - 1)
    return is_last and given.get("keepdim") is True and given.keys() <= {"input", "dim", "keepdim"}


def _is_square(node: fx.Node, x: fx.Node) -> bool:
    if len(node.users) != 1 or not node.args or _source(node.args[0]) is not _source(x):
        return False
    if is_named(node, "square"):
        return True
    by_itself = is_named(node, "mul") and len(node.args) == 2 and node.args[0] is node.args[1]
    return by_itself or (is_named(node, "pow") and node.args[1:] == (2,))


def _times_weight(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Returns the product of a norm with a weight for each column, and the weight; the norm itself if there is none."""
    last = node
    while len(last.users) == 1:
        (user,) = last.users
        if _is_cast(user):
            last = user
            continue
        others = [item for item in user.all_input_nodes if item is not last]
        if is_named(user, "mul") and len(user.args) == 2 and len(others) == 1 and _is_weight(others[0], node):
            return user, others[0]
        break
    return node, None


def _is_weight(node: fx.Node, normal: fx.Node) -> bool:
    value = example_of(node)
    has_columns = isinstance(value, Tensor) and value.ndim == 1 and value.shape[0] == example_of(normal).shape[-1]
    return has_columns and value.dtype == torch.float32


def _source(node: object) -> object:
    """Returns what a node is a copy of in the same type."""
    while isinstance(node, fx.Node) and _is_cast(node):
        node = node.args[0]
    return node


def _is_cast(node: fx.Node) -> bool:
    """True for a conversion that changes nothing."""
    if not (is_named(node, "to") or is_named(node, "float") or is_named(node, "type_as")) or not isinstance(
        node.args[0], fx.Node
    ):
        return False
    return is_single(node) and is_single(node.args[0])
