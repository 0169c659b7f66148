"""Rules of operators that only move numbers: views, permutations, concatenations, slices and indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx

from ort_accel.graph.nodes import permutation_of
from ort_accel.graph.symbolic_sizes import Size, expression, known_equal
from ort_accel.row_skipping.row_flow import (
    Dims,
    Propagation,
    RuleInputs,
    Rules,
    argument_names,
    call_operator,
    dim_argument,
    has_dims,
    other_dims,
    packed_dim,
    rank_of,
    slice_arguments,
    tensor_input,
    tensor_list,
    unary,
    value_of,
)

aten = torch.ops.aten

RULES = Rules()


@RULES.register(aten.cat)
def concatenation(node: fx.Node, dims: Dims) -> Propagation | None:
    """Joins parts side by side in each row. Empty parts, such as a key cache at its start, are dropped."""
    tensors = tensor_list(node)
    empty = frozenset(filter(_is_empty, tensors))
    parts = [part for part in tensors if part not in empty]
    dim = dim_argument(node, 1, rank_of(node))
    if any(rank_of(part) != rank_of(node) or value_of(part).dtype != value_of(node).dtype for part in parts):
        return None
    if len(parts) == 1:
        return Propagation({parts[0]: dims}, lambda inputs: inputs.packed(parts[0]), empty)
    if dim in dims or not parts:
        return None
    along = packed_dim(dim, dims)
    return Propagation(
        dict.fromkeys(parts, dims), lambda inputs: torch.cat([inputs.packed(part) for part in parts], along), empty
    )


def _is_empty(node: fx.Node) -> bool:
    return any(known_equal(size, 0) for size in value_of(node).shape)


@RULES.register(aten.stack)
def stack(node: fx.Node, dims: Dims) -> Propagation | None:
    parts = tensor_list(node)
    dim = dim_argument(node, 1, rank_of(node))
    if dim in dims:
        return None
    inner, along = tuple(d - (d > dim) for d in dims), packed_dim(dim, dims)
    return Propagation(
        dict.fromkeys(parts, inner), lambda inputs: torch.stack([inputs.packed(part) for part in parts], along)
    )


@RULES.register(aten.slice)
def slice_of_row(node: fx.Node, dims: Dims) -> Propagation | None:
    if is_whole(node):
        return unary(node, dims, lambda inputs, x: x)
    dim, start, end, step = slice_arguments(node)
    if dim in dims:
        return None
    along = packed_dim(dim, dims)
    return unary(
        node, dims, lambda inputs, x: aten.slice.Tensor(x, along, inputs.dense(start), inputs.dense(end), step)
    )


def is_whole(node: fx.Node) -> bool:
    """True if a slice takes everything."""
    return all(map(known_equal, value_of(node).shape, value_of(tensor_input(node)).shape))


@RULES.register(aten.select)
def select(node: fx.Node, dims: Dims) -> Propagation | None:
    dim = dim_argument(node, 1, rank_of(tensor_input(node)))
    inner = tuple(d + (d >= dim) for d in dims)
    along = packed_dim(dim, inner)
    return unary(node, inner, lambda inputs, x: x.select(along, inputs.dense(node.args[2])))


@RULES.register(aten.index)
def index(node: fx.Node, dims: Dims) -> Propagation | None:
    """Indexes one dimension with the same positions in each row."""
    indices = cast("list[fx.Node | None]", node.args[1])
    ((dim, positions), *more) = [(dim, item) for dim, item in enumerate(indices) if item is not None]
    if more or dim in dims or rank_of(positions) != 1 or value_of(positions).dtype != torch.int64:
        return None
    before = [None] * packed_dim(dim, dims)
    return unary(node, dims, lambda inputs, x: aten.index.Tensor(x, [*before, inputs.dense(positions)]))


SCATTERS_WITHOUT_REDUCTION = {aten.scatter.src, aten.scatter.value}


@RULES.register(aten.scatter)
def scatter(node: fx.Node, dims: Dims) -> Propagation | None:
    """Writes numbers into each row, by an index for each row."""
    operand, positions, source = tensor_input(node), tensor_input(node, 2), node.args[3]
    dim = dim_argument(node, 1, rank_of(node))
    tensors = [operand, positions, *([source] if isinstance(source, fx.Node) else [])]
    if node.target not in SCATTERS_WITHOUT_REDUCTION or dim in dims:
        return None
    if not all(has_dims(item, value_of(node), dims) for item in tensors):
        return None
    along = packed_dim(dim, dims)

    def compute(inputs: RuleInputs) -> Any:
        written = inputs.packed(source) if isinstance(source, fx.Node) else source
        return call_operator(node, inputs.packed(operand), along, inputs.packed(positions), written)

    return Propagation(dict.fromkeys(tensors, dims), compute)


@RULES.register(aten.zeros_like, aten.ones_like, aten.full_like)
def constant(node: fx.Node, dims: Dims) -> Propagation | None:
    return unary(node, dims, lambda inputs, x: call_operator(node, x, *node.args[1:], **node.kwargs))


@RULES.register(aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)
def split(node: fx.Node, dims: Dims) -> Propagation | None:
    position = argument_names(node).index("dim")
    dim = dim_argument(node, position, rank_of(tensor_input(node)))
    inner = tuple(d + (d >= dim) for d in dims) if node.target is aten.unbind.int else dims
    if dim in inner:
        return None
    along, sizes = packed_dim(dim, inner), node.args[1:position]
    return unary(node, inner, lambda inputs, x: call_operator(node, x, *sizes, along))


@RULES.register(aten.transpose, aten.permute, aten.t)
def permutation(node: fx.Node, dims: Dims) -> Propagation | None:
    order = permutation_of(node)
    inner = tuple(order[dim] for dim in dims)
    if inner != tuple(sorted(inner)):
        return None
    packed = [packed_dim(order[dim], inner) for dim in other_dims(len(order), dims)]
    is_same = packed == sorted(packed)
    return unary(node, inner, lambda inputs, x: x if is_same else x.permute([0, *packed]))


@RULES.register(aten.unsqueeze)
def unsqueeze(node: fx.Node, dims: Dims) -> Propagation | None:
    dim = dim_argument(node, 1, rank_of(node))
    if dim in dims:
        return None
    inner = tuple(d - (d > dim) for d in dims)
    return unary(node, inner, lambda inputs, x: x.unsqueeze(packed_dim(dim, dims)))


@RULES.register(aten.expand)
def expand(node: fx.Node, dims: Dims) -> Propagation | None:
    operand, result = tensor_input(node), value_of(node)
    missing = result.ndim - rank_of(operand)
    sizes = _fixed_sizes(result, dims)
    if sizes is None or not has_dims(operand, result, dims):
        return None
    inner = tuple(dim - missing for dim in dims)

    def compute(inputs: RuleInputs, x: Tensor) -> Tensor:
        for _ in range(missing - sum(d < missing for d in dims)):
            x = x.unsqueeze(1)
        return x.expand([x.shape[0], *sizes])

    return unary(node, inner, compute)


LIKE_ANOTHER = {aten.view_as.default, aten.reshape_as.default}


@RULES.register(
    aten.view,
    aten.view_as,
    aten.reshape,
    aten.reshape_as,
    aten._unsafe_view,
    aten.flatten,
    aten.unflatten,
    aten.squeeze,
)
def view(node: fx.Node, dims: Dims) -> Propagation | None:
    operand, result = tensor_input(node), value_of(node)
    shape = value_of(operand).shape
    inner = _dims_before_view(shape, result.shape, dims)
    sizes = _fixed_sizes(result, dims)
    if inner is None or sizes is None:
        return None
    before = [expression(size) for dim, size in enumerate(shape) if dim not in inner]

    def compute(inputs: RuleInputs) -> Tensor:
        x = inputs.packed(operand)
        return x if before == sizes else x.reshape([x.shape[0], *sizes])

    lends_shape = frozenset(node.all_input_nodes) - {operand} if node.target in LIKE_ANOTHER else frozenset()
    return Propagation({operand: inner}, compute, lends_shape)


def _fixed_sizes(result: Tensor, dims: Dims) -> list[int] | None:
    """Returns the sizes of the dimensions that hold no rows; None if one of them is symbolic."""
    sizes = [expression(result.shape[dim]) for dim in other_dims(result.ndim, dims)]
    return sizes if all(isinstance(size, int) for size in sizes) else None


def _dims_before_view(before: Sequence[Size], after: Sequence[Size], dims: Dims) -> Dims | None:
    """Returns the dimensions that hold the rows before a view; None if the view mixes rows and other dimensions."""
    found: list[int] = []
    for old, new in view_groups(before, after):
        inside = [dim for dim in new if dim in dims]
        if inside and len(inside) < len(new) and any(expression(after[d]) != 1 for d in new if d not in dims):
            return None
        if inside:
            found += old
    return tuple(found) if found else None


def view_groups(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Returns groups of dimensions of two shapes that hold the same numbers, from the left."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = list(range(i, min(i + 1, len(before)))), list(range(j, min(j + 1, len(after))))
        i, j = i + len(old), j + len(new)
        while not known_equal(_product(before, old), _product(after, new)):
            if j < len(after) and (i >= len(before) or _is_smaller(_product(after, new), _product(before, old))):
                new.append(j)
                j += 1
            elif i < len(before):
                old.append(i)
                i += 1
            else:
                return [(list(range(len(before))), list(range(len(after))))]
        groups.append((old, new))
    return groups


def _is_smaller(size: Size, other: Size) -> bool:
    """True if a size is known to divide the other one."""
    divisor, dividend = sympy.sympify(expression(size)), sympy.sympify(expression(other))
    return divisor != 0 and bool((dividend / divisor).is_integer)


def _product(shape: Sequence[Size], dims: Sequence[int]) -> Size:
    product: Size = 1
    for dim in dims:
        product = product * shape[dim]
    return product
