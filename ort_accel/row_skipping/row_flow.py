"""How the rows of a result come from rows of the inputs, and what the rules for single operators are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, fx

from ort_accel.graph.symbolic_sizes import known_equal

Dims = tuple[int, ...]


class Source(Protocol):
    """Gives the inputs of an operator while a smaller graph is written."""

    def packed(self, node: fx.Node) -> Tensor:
        """An input with rows, in its packed form."""

    def dense(self, value: Any) -> Any:
        """An input without rows, or an argument that is no tensor, as it is."""

    def along(self, value: Tensor, dim: int, axis: int) -> Tensor:
        """A value that changes along one axis of the rows only, which is its dimension `dim`, for each row."""


@dataclass(frozen=True)
class Passage:
    """How the rows of a result come from rows of the inputs."""

    needs: dict[fx.Node, Dims]
    """Inputs with rows, and the dimensions along which these lie."""
    make: Callable[[Source], Any]
    unread: frozenset[fx.Node] = frozenset()
    """Inputs of which no number is read: they are empty, or only lend their type; or they lie within."""
    reads: frozenset[fx.Node] = frozenset()
    """What is read in full that is no input of the node, where several nodes are one step."""
    within: tuple[fx.Node, ...] = ()
    """The other nodes of such a step."""


Rule = Callable[[fx.Node, Dims], Passage | None]


class Rules(dict[Any, Rule]):
    """The rules of a family of operators."""

    def of(self, *packets: Any) -> Callable[[Rule], Rule]:
        """Add the rule of some operators."""

        def add(rule: Rule) -> Rule:
            self.update(dict.fromkeys(packets, rule))
            return rule

        return add


def value_of(node: fx.Node) -> Tensor:
    """The fake tensor of a node; the first one of several."""
    value = node.meta["val"]
    return value[0] if isinstance(value, tuple | list) else value


def shape_of(item: Any) -> Sequence[Any] | None:
    """The sizes of an argument, if it is a tensor."""
    value = item.meta.get("val") if isinstance(item, fx.Node) else None
    return value.shape if isinstance(value, Tensor) else None


def packed_dim(dim: int, dims: Dims) -> int:
    """Where a dimension that holds no rows stands in the packed form."""
    return 1 + dim - sum(other < dim for other in dims)


def rest_of(rank: int, dims: Dims) -> list[int]:
    """The dimensions that hold no rows."""
    return [dim for dim in range(rank) if dim not in dims]


def of_one(node: fx.Node, dims: Dims, make: Callable[[Source, Tensor], Any]) -> Passage:
    """A passage for an operator with one input that has rows."""
    given: Any = node.args[0]
    return Passage({given: dims}, lambda source: make(source, source.packed(given)))


def rank_of(node: Any) -> int:
    """How many dimensions a node's value has."""
    return value_of(node).ndim


def held_in_full(operand: Tensor, result: Tensor, dims: Dims) -> Dims:
    """Those of the result's dimensions that an operand of an element-wise operator has in full."""
    lacks = result.ndim - operand.ndim
    return tuple(d for d in dims if d >= lacks and known_equal(operand.shape[d - lacks], result.shape[d]))


def is_full(operand: fx.Node, result: Tensor, dims: Dims) -> bool:
    """Whether an operand has all of these dimensions of the result in full."""
    return held_in_full(value_of(operand), result, dims) == dims
