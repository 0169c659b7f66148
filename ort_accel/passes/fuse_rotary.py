"""Replaces the operators by which models write a rotary embedding by one (`kernels/rotary.py`), in single precision.

It runs before autograd, on the graph that Dynamo captured, so that the gradient is one operator, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import cast

import torch
from torch import fx
from torch.fx.node import Argument

from ort_accel.graph.symbolic_sizes import expression, known_equal
from ort_accel.kernels.rotary import rotary
from ort_accel.passes.common import (
    example_of,
    fuse_each,
    has_one_reader,
    is_named,
    is_single,
    operands_of,
    strides_of,
)
from ort_accel.passes.options import PassOptions

STEPS = ("add", "mul", "cat", "neg", "getitem", "chunk")
"""Names of the operators that an embedding is written with."""


def fuse_rotary(graph: fx.Graph, _: PassOptions) -> int:
    """Fuse each embedding; returns how many."""
    return fuse_each(graph, _embedding, rotary, STEPS)


def _embedding(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Returns x and both tables where a node is `x * cosines + rotate_half(x) * sines`."""
    addends = operands_of(node, "add")
    if addends is None or not is_single(node):
        return None
    for one, other in (addends, addends[::-1]):
        for (x, cosines), (turned, sines) in product(_factors(one), _factors(other)):
            if is_single(x) and _is_turned(turned, x) and all(_is_table(table, x) for table in (cosines, sines)):
                found = x, cast("fx.Node", cosines), cast("fx.Node", sines)
                return found if _is_laid_out_as(node, x) else None
    return None


def _factors(node: Argument) -> Iterator[tuple[Argument, Argument]]:
    """Yields both factors of a product with one reader, in both orders."""
    factors = operands_of(node, "mul")
    if factors is not None and has_one_reader(node):
        yield factors
        yield factors[::-1]


def _is_turned(node: Argument, x: fx.Node) -> bool:
    """True if a node is `cat((-high, low), -1)`, where low and high are the halves of x."""
    if not is_named(node, "cat") or not has_one_reader(node) or not node.args:
        return False
    parts, dim = node.args[0], dict(zip(("tensors", "dim"), node.args, strict=False)).get("dim", node.kwargs.get("dim"))
    if not isinstance(parts, list | tuple) or len(parts) != 2 or dim not in (-1, example_of(x).ndim - 1):
        return False
    negated, low = parts
    is_negative = is_named(negated, "neg") and has_one_reader(negated)
    return is_negative and _is_half(low, x, 0) and _is_half(cast("fx.Node", negated).args[0], x, 1)


def _is_half(node: Argument, x: fx.Node, number: int) -> bool:
    """True if a node is this half of the last dimension."""
    size = expression(example_of(x).shape[-1])
    if not is_named(node, "getitem") or not isinstance(size, int) or size % 2:
        return False
    source, index = node.args
    if source is x:
        return bool(index == (..., (slice(None, size // 2, None), slice(size // 2, None, None))[number]))
    return is_named(source, "chunk") and bool(index == number) and _are_halves(source, x)


def _are_halves(chunks: fx.Node, x: fx.Node) -> bool:
    """True for the two parts of x along its last dimension."""
    given = dict(zip(("input", "chunks", "dim"), chunks.args, strict=False)) | chunks.kwargs
    is_last = given.get("dim", 0) in (-1, example_of(x).ndim - 1)
    return bool(given.get("input") is x and given.get("chunks") == 2 and is_last)


def _is_table(node: Argument, x: fx.Node) -> bool:
    """True for a tensor without gradient that has a number for each of x, or is repeated along some dimensions."""
    if not is_single(node) or example_of(node).requires_grad:
        return False
    table, of = example_of(node).shape, example_of(x).shape
    is_last = len(table) > 0 and known_equal(table[-1], of[-1])
    pairs = zip(reversed(table), reversed(of), strict=False)
    return is_last and len(table) <= len(of) and all(expression(a) == 1 or known_equal(a, b) for a, b in pairs)


def _is_laid_out_as(node: fx.Node, x: fx.Node) -> bool:
    """True if a result lies in memory as the operator's will, so that it can be viewed as before."""
    result, ours = example_of(node), torch.empty_like(example_of(x))
    pairs = zip(result.shape, strides_of(result), strides_of(ours), strict=True)
    return all(expression(size) == 1 or stride == other for size, stride, other in pairs)
