"""Replaces the operators by which models write an RMS norm by one (`kernels/rms_norm.py`), in single precision.

It runs before autograd, on the graph that Dynamo captured, so that the gradient is one operator, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.kernels.rms_norm import rms_norm
from ort_accel.passes.options import PassOptions


def fuse_rms_norm(graph: fx.Graph, _: PassOptions) -> int:
    """Fuse each norm; returns how many."""
    count = 0
    replaced: set[fx.Node] = set()
    for node in list(graph.nodes):
        if (found := _normal(node)) is None:
            continue
        x, eps = found
        whole, weight = _times_weight(node)
        with graph.inserting_before(whole):
            fused = graph.call_function(rms_norm, (x, weight, eps))
        fused.meta = dict(whole.meta)
        whole.replace_all_uses_with(fused)
        _collect_steps(whole, replaced)
        count += 1
    for node in reversed(graph.nodes):
        if node in replaced:
            graph.erase_node(node)
    if count and graph.owning_module is not None:
        graph.owning_module.recompile()
    return count


STEPS = ("mul", "to", "float", "type_as", "rsqrt", "add", "mean", "pow", "square")
"""Names of the operators that a norm is written with."""


def _collect_steps(whole: fx.Node, found: set[fx.Node]) -> None:
    """Adds the operators that served a norm alone. Others without readers, such as those of `vmap`, are to stay."""
    pending = [whole]
    while pending:
        node = pending.pop()
        if node not in found and found.issuperset(node.users) and any(_is(node, name) for name in STEPS):
            found.add(node)
            pending += node.all_input_nodes


def _normal(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Returns x and eps where a node is `x * rsqrt(mean(x ** 2, -1) + eps)`, and nothing else reads the steps."""
    if not _is(node, "mul") or len(node.args) != 2 or not _is_single(node):
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
    if not isinstance(node, fx.Node) or not _is(node, name) or len(node.users) != 1:
        return None
    first = node.args[0]
    return first if isinstance(first, fx.Node) else None


def _is_over_last(mean: fx.Node, x: fx.Node) -> bool:
    given = dict(zip(("input", "dim", "keepdim"), mean.args, strict=False)) | mean.kwargs
    dim = given.get("dim")
    last = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    is_last = last in (-1, _example(x).ndim - 1)
    return is_last and given.get("keepdim") is True and given.keys() <= {"input", "dim", "keepdim"}


def _is_square(node: fx.Node, x: fx.Node) -> bool:
    if len(node.users) != 1 or not node.args or _source(node.args[0]) is not _source(x):
        return False
    if _is(node, "square"):
        return True
    by_itself = _is(node, "mul") and len(node.args) == 2 and node.args[0] is node.args[1]
    return by_itself or (_is(node, "pow") and node.args[1:] == (2,))


def _times_weight(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Returns the product of a norm with a weight for each column, and the weight; the norm itself if there is none."""
    last = node
    while len(last.users) == 1:
        (user,) = last.users
        if _is_cast(user):
            last = user
            continue
        others = [item for item in user.all_input_nodes if item is not last]
        if _is(user, "mul") and len(user.args) == 2 and len(others) == 1 and _is_weight(others[0], node):
            return user, others[0]
        break
    return node, None


def _is_weight(node: fx.Node, normal: fx.Node) -> bool:
    value = _example(node)
    has_columns = isinstance(value, Tensor) and value.ndim == 1 and value.shape[0] == _example(normal).shape[-1]
    return has_columns and value.dtype == torch.float32


def _source(node: object) -> object:
    """Returns what a node is a copy of in the same type."""
    while isinstance(node, fx.Node) and _is_cast(node):
        node = node.args[0]
    return node


def _is_cast(node: fx.Node) -> bool:
    """True for a conversion that changes nothing."""
    if not (_is(node, "to") or _is(node, "float") or _is(node, "type_as")) or not isinstance(node.args[0], fx.Node):
        return False
    return _is_single(node) and _is_single(node.args[0])


def _is_single(node: fx.Node) -> bool:
    value = _example(node)
    return isinstance(value, Tensor) and value.dtype == torch.float32


def _is(node: fx.Node, name: str) -> bool:
    """True for a method or a function of torch, or of Python, with this name."""
    if node.op == "call_method":
        return node.target == name
    return node.op == "call_function" and getattr(node.target, "__name__", "") == name


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")
