"""Values with arithmetic, so that a lowering reads as its formula: `x * sigmoid(x)`.

A number beside a term becomes a constant of the term's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ort_accel.lowering.onnx_graph import HALF_DTYPES, Input, Number, OnnxGraph, Operand, Value

Factor = Input | Number
"""An operand of a formula beside a term."""


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A value of a graph, and its type."""

    graph: OnnxGraph
    value: Value
    dtype: torch.dtype

    def op(self, op_type: str, *others: Factor, **attributes: Any) -> Term:
        """Return the result of an operator with this term as its first input; it has the term's type."""
        return Term(self.graph, self.graph.op(op_type, self, *map(self._input, others), **attributes), self.dtype)

    def _input(self, other: Factor) -> Input:
        return self.graph.scalar(other, self.dtype) if isinstance(other, Number) else other

    def _reversed(self, op_type: str, other: Number) -> Term:
        return Term(self.graph, self.graph.op(op_type, self._input(other), self), self.dtype)

    def __add__(self, other: Factor) -> Term:
        return self.op("Add", other)

    def __sub__(self, other: Factor) -> Term:
        return self.op("Sub", other)

    def __mul__(self, other: Factor) -> Term:
        return self.op("Mul", other)

    def __truediv__(self, other: Factor) -> Term:
        return self.op("Div", other)

    def __radd__(self, other: Number) -> Term:
        return self._reversed("Add", other)

    def __rsub__(self, other: Number) -> Term:
        return self._reversed("Sub", other)

    def __rmul__(self, other: Number) -> Term:
        return self._reversed("Mul", other)

    def __rtruediv__(self, other: Number) -> Term:
        return self._reversed("Div", other)

    def __neg__(self) -> Term:
        return self.op("Neg")

    def __abs__(self) -> Term:
        return self.op("Abs")

    def _compare(self, op_type: str, other: Factor) -> Term:
        return Term(self.graph, self.graph.op(op_type, self, self._input(other)), torch.bool)

    def __lt__(self, other: Factor) -> Term:
        return self._compare("Less", other)

    def __le__(self, other: Factor) -> Term:
        return self._compare("LessOrEqual", other)

    def __gt__(self, other: Factor) -> Term:
        return self._compare("Greater", other)

    def __ge__(self, other: Factor) -> Term:
        return self._compare("GreaterOrEqual", other)

    def equals(self, other: Factor) -> Term:
        return self._compare("Equal", other)

    def is_nan(self) -> Term:
        return Term(self.graph, self.graph.op("IsNaN", self), torch.bool)

    def where(self, condition: Input, otherwise: Factor) -> Term:
        """Return this term where a condition holds, and another value elsewhere."""
        return Term(self.graph, self.graph.op("Where", condition, self, self._input(otherwise)), self.dtype)


Result = Value | Term
"""The result of a lowering."""


def term(graph: OnnxGraph, operand: Operand, dtype: torch.dtype | None = None) -> Term:
    """Return a tensor as a term, cast to a type where one is given."""
    dtype = operand.dtype if dtype is None else dtype
    return Term(graph, graph.cast(operand, dtype), dtype)


def exp(x: Term) -> Term:
    return x.op("Exp")


def log(x: Term) -> Term:
    return x.op("Log")


def tanh(x: Term) -> Term:
    return x.op("Tanh")


def sigmoid(x: Term) -> Term:
    """Return 1 / (1 + exp(-x)); the kernel of ONNX Runtime is 0 below -18, and a logarithm of it infinite."""
    is_half = x.dtype in HALF_DTYPES
    wide = Term(x.graph, x.graph.cast_from(x.value, x.dtype, torch.float32), torch.float32) if is_half else x
    found = (exp(-wide) + 1).op("Reciprocal")
    return Term(x.graph, x.graph.cast_from(found.value, found.dtype, x.dtype), x.dtype)


def relu(x: Term) -> Term:
    return x.op("Relu")


def sign(x: Term) -> Term:
    return x.op("Sign")


def floor(x: Term) -> Term:
    return x.op("Floor")
