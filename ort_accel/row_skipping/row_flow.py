"""Defines a rule: how an operator's result rows follow from rows of its inputs. Holds the helpers of all rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ort_accel.graph.symbolic_sizes import Size, known_equal

Dims = tuple[int, ...]


class RuleInputs(Protocol):
    """Gives a rule the inputs of its operator while the smaller graph is written."""

    def packed(self, node: fx.Node) -> Tensor:
        """Returns an input with rows as packed rows."""

    def dense(self, value: Argument) -> Any:
        """Returns an input without rows, or an argument that is no tensor."""

    def gather_along(self, value: Tensor, dim: int, axis: int) -> Tensor:
        """Returns one entry for each row of a value whose dimension `dim` is one axis of the rows."""


@dataclass(frozen=True)
class Propagation:
    """Tells how the rows of a result follow from rows of the inputs."""

    row_dims: dict[fx.Node, Dims]
    """Inputs with rows, and the dimensions along which their rows lie."""
    compute: Callable[[RuleInputs], Any]
    unread: frozenset[fx.Node] = frozenset()
    """Inputs whose numbers are not read: empty ones, those that lend only their type, and inner nodes."""
    read_in_full: frozenset[fx.Node] = frozenset()
    """Values that the inner nodes read in full."""
    inner_nodes: tuple[fx.Node, ...] = ()
    """The other nodes, where several nodes are matched as one step."""


Rule = Callable[[fx.Node, Dims], Propagation | None]


class Rules(dict[torch._ops.OpOverloadPacket[..., Any], Rule]):
    """The rules of a family of operators."""

    def register(self, *packets: torch._ops.OpOverloadPacket[..., Any]) -> Callable[[Rule], Rule]:
        """Registers a function as the rule of these operators."""

        def add(rule: Rule) -> Rule:
            self.update(dict.fromkeys(packets, rule))
            return rule

        return add


def value_of(node: fx.Node) -> Tensor:
    """Returns a node's fake tensor; the first one of several."""
    value = node.meta["val"]
    tensor: Tensor = value[0] if isinstance(value, tuple | list) else value
    return tensor


def shape_of(item: Argument) -> Sequence[Size] | None:
    """Returns the sizes of an argument that is a tensor."""
    value = item.meta.get("val") if isinstance(item, fx.Node) else None
    return value.shape if isinstance(value, Tensor) else None


def rank_of(node: fx.Node) -> int:
    """Returns the number of a value's dimensions."""
    return value_of(node).ndim


def tensor_input(node: fx.Node, position: int = 0) -> fx.Node:
    """Returns the argument at this position, which is a tensor."""
    item = node.args[position]
    assert isinstance(item, fx.Node)
    return item


def tensor_list(node: fx.Node) -> list[fx.Node]:
    """Returns the first argument of an operator that takes a list of tensors."""
    items = node.args[0]
    assert isinstance(items, list | tuple)
    return [item for item in items if isinstance(item, fx.Node)]


def dim_argument(node: fx.Node, position: int, rank: int, default: int = 0) -> int:
    """Returns the dimension that an argument names, counted from the left."""
    dim = node.args[position] if len(node.args) > position else default
    assert isinstance(dim, int)
    return dim % rank


class SliceArguments(NamedTuple):
    """The arguments of a slice, with the defaults of those that are not given."""

    dim: int
    start: Argument
    end: Argument
    step: Argument


def slice_arguments(node: fx.Node) -> SliceArguments:
    """Returns the arguments of a slice, its dimension counted from the left."""
    given = list(node.args[2:])
    start, end, step = given + [None, None, 1][len(given) :]
    return SliceArguments(dim_argument(node, 1, rank_of(node)), 0 if start is None else start, end, step)


def argument_names(node: fx.Node) -> list[str]:
    """Returns the names of the arguments that a node's operator takes."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return [argument.name for argument in node.target._schema.arguments]


def call_operator(node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """Calls a node's operator with other arguments."""
    assert callable(node.target)
    return node.target(*args, **kwargs)


def packed_dim(dim: int, dims: Dims) -> int:
    """Returns where a dimension without rows stands in the packed form."""
    return 1 + dim - sum(other < dim for other in dims)


def other_dims(rank: int, dims: Dims) -> list[int]:
    """Returns the dimensions that hold no rows."""
    return [dim for dim in range(rank) if dim not in dims]


def unary(node: fx.Node, dims: Dims, compute: Callable[[RuleInputs, Tensor], Any]) -> Propagation:
    """Returns the propagation of an operator whose first input alone has rows."""
    operand = tensor_input(node)
    return Propagation({operand: dims}, lambda inputs: compute(inputs, inputs.packed(operand)))


def matching_dims(operand: Tensor, result: Tensor, dims: Dims) -> Dims:
    """Returns those of the result's dimensions that an element-wise operand has without broadcasting."""
    missing = result.ndim - operand.ndim
    return tuple(d for d in dims if d >= missing and known_equal(operand.shape[d - missing], result.shape[d]))


def has_dims(operand: fx.Node, result: Tensor, dims: Dims) -> bool:
    """True if an operand has all of these dimensions of the result without broadcasting."""
    return matching_dims(value_of(operand), result, dims) == dims
