"""The floating point operations of a node, at the sizes of the capture, and of a graph at any sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from ort_accel.graph.meta_keys import RUNS_AFTER
from ort_accel.graph.symbolic_sizes import SizeFunction, expression, hint, is_known
from ort_accel.operators.facts import facts


def flops(node: fx.Node) -> int:
    """Return the estimated operations of a node; 0 for operators whose time is not spent computing."""
    formula = facts(node).flops
    if formula is None:
        return 0
    arguments, result = _operands(node, hint)
    return formula(*arguments, result=result)


class GraphFlops:
    """Computes the estimated operations of a graph from the sizes of its inputs. Recomputed nodes do not count."""

    def __init__(self, graph: fx.Graph) -> None:
        nodes = [node for node in graph.nodes if node.op == "call_function" and RUNS_AFTER not in node.meta]
        self._calls = [(formula, *_operands(node, expression)) for node in nodes if (formula := facts(node).flops)]
        self._totals: dict[tuple[int, ...], int] = {}
        self._sizes = SizeFunction({size: None for _, *operands in self._calls for size in _symbolic(operands)})

    def __call__(self, symbols: dict[str, int]) -> int:
        """Return the operations for these values of the symbols in sizes."""
        sizes = self._sizes(symbols)
        if sizes not in self._totals:
            known = dict(zip(self._sizes.sizes, sizes, strict=True))
            self._totals[sizes] = sum(
                formula(*_filled(arguments, known), result=_filled(result, known))
                for formula, arguments, result in self._calls
            )
        return self._totals[sizes]


Operands = tuple[Any, ...]
"""Arguments of a formula: shapes in place of tensors."""


def _operands(node: fx.Node, size_of: Callable[[Any], Any]) -> tuple[Operands, Any]:
    """Return the arguments of a node, and its result, with shapes in place of tensors."""
    arguments = fx.map_arg(node.args, lambda argument: _shapes(argument.meta.get("val"), size_of))
    return arguments, _shapes(node.meta.get("val"), size_of)


def _shapes(value: Any, size_of: Callable[[Any], Any]) -> Any:
    """Return the sizes of a tensor, or of each in a list; a size that depends on data counts 0."""
    if isinstance(value, torch.Tensor):
        return tuple(size_of(size) if is_known(size) else 0 for size in value.shape)
    return tuple(_shapes(item, size_of) for item in value) if isinstance(value, tuple | list) else value


def _symbolic(value: Any) -> list[sympy.Expr]:
    """Return the sizes in a value that are expressions."""
    if isinstance(value, tuple | list):
        return [size for item in value for size in _symbolic(item)]
    return [value] if isinstance(value, sympy.Expr) else []


def _filled(value: Any, sizes: Mapping[sympy.Expr, int]) -> Any:
    """Return a value with numbers for expressions."""
    if isinstance(value, tuple | list):
        return tuple(_filled(item, sizes) for item in value)
    return sizes[value] if isinstance(value, sympy.Expr) else value
