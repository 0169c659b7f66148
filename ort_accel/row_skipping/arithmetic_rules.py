"""Rules of operators that compute element by element, or along dimensions that hold no rows."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ort_accel.kernels import gated, linear_4bit, linear_8bit, linear_token_scores, rms_norm, rotary
from ort_accel.kernels.token_log_probs import token_scores
from ort_accel.row_skipping.row_flow import (
    Dims,
    Propagation,
    RuleInputs,
    Rules,
    argument_names,
    call_operator,
    dim_argument,
    has_dims,
    matching_dims,
    other_dims,
    packed_dim,
    rank_of,
    tensor_input,
    unary,
    value_of,
)

aten = torch.ops.aten

RULES = Rules()


def _operand(inputs: RuleInputs, node: fx.Node, result: Tensor, dims: Dims) -> Tensor:
    """Returns an operand for packed rows; it matches all of `dims`, one of them, or none, and may lack leading ones."""
    fake = value_of(node)
    missing, matching = result.ndim - fake.ndim, matching_dims(fake, result, dims)
    if matching == dims:
        value = inputs.packed(node)
    else:
        value = inputs.dense(node)
        if matching:
            value = inputs.gather_along(value, matching[0] - missing, dims.index(matching[0]))
        absent = [d - missing for d in dims if d not in matching]
        gone = [packed_dim(d, (matching[0] - missing,)) if matching else d for d in absent]
        for dim in sorted((d for d in gone if d >= 0), reverse=True):
            value = value.squeeze(dim)
        if not matching:
            return value if value.ndim or not fake.ndim else value.unsqueeze(0)  # shape () promotes less
    for _ in range(missing - sum(d < missing for d in dims)):
        value = value.unsqueeze(1)
    return value


@RULES.register(
    aten.to,
    aten.type_as,
    aten.contiguous,
    aten.clone,
    aten.detach,
    aten.alias,
    aten.__and__,
    aten.__or__,
    aten.masked_fill,
    aten.where,
    aten.rsub,
    aten.silu,
    gated.own.gated,
)
def elementwise(node: fx.Node, dims: Dims) -> Propagation | None:
    result = value_of(node)
    operands = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    if any(len(matching_dims(value_of(a), result, dims)) not in (0, 1, len(dims)) for a in operands):
        return None
    full = {a: tuple(d - result.ndim + rank_of(a) for d in dims) for a in operands if has_dims(a, result, dims)}
    if not full:
        return None
    if node.target is aten.type_as.default or "memory_format" in node.kwargs:
        return _convert(node, full)

    def compute(inputs: RuleInputs) -> Tensor:
        def convert(item: fx.Node) -> Argument:
            is_tensor = isinstance(item.meta.get("val"), Tensor)
            return _operand(inputs, item, result, dims) if is_tensor else inputs.dense(item)

        args, kwargs = fx.map_arg(node.args, convert), fx.map_arg(node.kwargs, convert)
        return cast("Tensor", call_operator(node, *args, **kwargs))

    return Propagation(full, compute)


def _convert(node: fx.Node, full: dict[fx.Node, Dims]) -> Propagation | None:
    """Changes the type; a change of the memory's order is left out, since packed rows are contiguous."""
    operand = tensor_input(node)
    if operand not in full:
        return None
    dtype = value_of(node).dtype
    lends_type = frozenset(node.all_input_nodes) - {operand}
    return Propagation({operand: full[operand]}, lambda inputs: inputs.packed(operand).to(dtype), lends_type)


@RULES.register(aten.dropout)
def dropout(node: fx.Node, dims: Dims) -> Propagation | None:
    """Passes rows on; the writer of the graph draws the mask and applies it."""
    return unary(node, dims, lambda inputs, x: x)


@RULES.register(aten.linear, linear_4bit.own.linear_4bit, linear_8bit.own.linear_8bit)
def linear(node: fx.Node, dims: Dims) -> Propagation | None:
    operand = tensor_input(node)
    if rank_of(operand) - 1 in dims or rank_of(node) != rank_of(operand):
        return None
    return unary(node, dims, lambda inputs, x: call_operator(node, x, *map(inputs.dense, node.args[1:])))


@RULES.register(aten.mm, aten.matmul)
def matmul(node: fx.Node, dims: Dims) -> Propagation | None:
    operand, weight = tensor_input(node), tensor_input(node, 1)
    if rank_of(weight) != 2 or rank_of(operand) < 2 or rank_of(operand) - 1 in dims:
        return None
    return unary(node, dims, lambda inputs, x: torch.matmul(x, inputs.dense(weight)))


@RULES.register(aten.addmm)
def addmm(node: fx.Node, dims: Dims) -> Propagation | None:
    bias, operand, weight = (tensor_input(node, position) for position in range(3))
    if dims != (0,) or node.kwargs or rank_of(bias) != 1:
        return None
    return Propagation(
        {operand: dims},
        lambda inputs: aten.addmm.default(inputs.dense(bias), inputs.packed(operand), inputs.dense(weight)),
    )


@RULES.register(aten.layer_norm, aten.rms_norm)
def norm(node: fx.Node, dims: Dims) -> Propagation | None:
    shape = cast("list[int]", node.args[1])
    if max(dims) >= rank_of(node) - len(shape):
        return None

    def compute(inputs: RuleInputs, x: Tensor) -> Any:
        return call_operator(node, x, *map(inputs.dense, node.args[1:]), **node.kwargs)

    return unary(node, dims, compute)


@RULES.register(rotary.own.rotary)
def rotary_embedding(node: fx.Node, dims: Dims) -> Propagation | None:
    return None if rank_of(node) - 1 in dims else elementwise(node, dims)


@RULES.register(rms_norm.own.rms_norm)
def own_rms_norm(node: fx.Node, dims: Dims) -> Propagation | None:
    if rank_of(tensor_input(node)) - 1 in dims:
        return None
    return unary(node, dims, lambda inputs, x: call_operator(node, x, *map(inputs.dense, node.args[1:])))


@RULES.register(aten.embedding)
def embedding(node: fx.Node, dims: Dims) -> Propagation | None:
    weight, ids = tensor_input(node), tensor_input(node, 1)
    is_scaled_by_frequency = len(node.args) > 3 and node.args[3]  # the gradient depends on the count of ids in all rows
    if rank_of(node) - 1 in dims or is_scaled_by_frequency:
        return None
    return Propagation(
        {ids: dims}, lambda inputs: aten.embedding.default(inputs.dense(weight), inputs.packed(ids), *node.args[2:])
    )


@RULES.register(aten.topk)
def topk(node: fx.Node, dims: Dims) -> Propagation | None:
    rank = rank_of(tensor_input(node))
    dim = dim_argument(node, 2, rank, default=-1)
    if node.kwargs or dim in dims:
        return None
    along = packed_dim(dim, dims)
    return unary(node, dims, lambda inputs, x: aten.topk.default(x, node.args[1], along, *node.args[3:]))


@RULES.register(aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax, aten.cumsum, aten.glu)
def along_one_dimension(node: fx.Node, dims: Dims) -> Propagation | None:
    rank = rank_of(node)
    dim = node.args[1] if len(node.args) > 1 else -1
    if not isinstance(dim, int) or dim % rank in dims:
        return None
    along = packed_dim(dim % rank, dims)
    return unary(node, dims, lambda inputs, x: call_operator(node, x, along, *node.args[2:], **node.kwargs))


@RULES.register(torch.ops.ort_accel.token_scores)
def scores_of_targets(node: fx.Node, dims: Dims) -> Propagation | None:
    scores, targets = tensor_input(node), tensor_input(node, 1)
    return Propagation(
        {scores: dims, targets: dims}, lambda inputs: token_scores(inputs.packed(scores), inputs.packed(targets))
    )


@RULES.register(linear_token_scores.own.linear_token_scores)
def scores_of_head(node: fx.Node, dims: Dims) -> Propagation | None:
    hidden, targets = tensor_input(node), tensor_input(node, 3)
    return Propagation(
        {hidden: dims, targets: dims},
        lambda inputs: call_operator(
            node, inputs.packed(hidden), *map(inputs.dense, node.args[1:3]), inputs.packed(targets), *node.args[4:]
        ),
    )


@RULES.register(aten.gather)
def gather(node: fx.Node, dims: Dims) -> Propagation | None:
    """Picks entries of each row by an index for each row; the source may have further rows behind those."""
    operand, index = tensor_input(node), tensor_input(node, 2)
    dim = dim_argument(node, 1, rank_of(node))
    if dim in dims or dims[0] != 0 or not has_dims(operand, value_of(node), dims[1:]):
        return None
    along = packed_dim(dim, dims)
    return Propagation(
        {operand: dims, index: dims}, lambda inputs: torch.gather(inputs.packed(operand), along, inputs.packed(index))
    )


@RULES.register(aten.mean, aten.sum, aten.amax, aten.amin, aten.var, aten.std, aten.logsumexp, aten.norm, aten.argmax)
def reduction(node: fx.Node, dims: Dims) -> Propagation | None:
    names = argument_names(node)
    if "dim" not in names or names.index("dim") != 1 or len(node.args) < 2 or node.args[1] is None:
        return None
    rank = rank_of(tensor_input(node))
    is_list = isinstance(node.args[1], list | tuple)
    reduced = cast("list[int]", node.args[1] if is_list else [node.args[1]])
    over = [dim % rank for dim in reduced]
    position = names.index("keepdim")
    keeps_dims = node.args[position] if len(node.args) > position else node.kwargs.get("keepdim", False)
    inner = dims if keeps_dims else tuple(other_dims(rank, tuple(over))[dim] for dim in dims)
    if not over or set(over) & set(inner):
        return None
    packed = [packed_dim(dim, inner) for dim in over]
    along = packed if is_list else packed[0]
    return unary(node, inner, lambda inputs, x: call_operator(node, x, along, *node.args[2:], **node.kwargs))
