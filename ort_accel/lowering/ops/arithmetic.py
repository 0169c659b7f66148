"""Arithmetic of two or more tensors."""

from __future__ import annotations

import math

import torch

from ort_accel.graph.symbolic_sizes import known_positive
from ort_accel.lowering.onnx_graph import NotLowerable, Number, OnnxGraph, Operand, Value
from ort_accel.lowering.ops.elementwise import extreme_of_two, log1p_of, operand_as, root_of, trunc_of
from ort_accel.lowering.registry import Lowering, lowers
from ort_accel.lowering.term import Result, Term, exp, log, term

aten = torch.ops.aten


def binary(graph: OnnxGraph, op_type: str, one: Operand | Number, other: Operand | Number) -> Value:
    """Add an operator on two tensors or numbers, in the type of the result."""
    dtype = graph.result.dtype
    return graph.op(op_type, operand_as(graph, one, dtype), operand_as(graph, other, dtype))


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> Value:
    return binary(graph, "And" if graph.result.dtype == torch.bool else "Mul", one, other)


@lowers(aten.div.Tensor, aten.div.Scalar)
def div(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> Value:
    return binary(graph, "Div", one, other)


def _scaled(graph: OnnxGraph, item: Operand | Number, alpha: float, dtype: torch.dtype) -> Value:
    value = operand_as(graph, item, dtype)
    return value if alpha == 1 else graph.op("Mul", value, graph.scalar(alpha, dtype))


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(graph: OnnxGraph, one: Operand | Number, other: Operand | Number, alpha: float = 1) -> Result:
    dtype = graph.result.dtype
    if dtype == torch.bool:
        return binary(graph, "Or", one, other)
    if isinstance(other, int | float) and other * alpha == 0 and isinstance(one, Operand) and one.dtype == dtype:
        return one.value
    return graph.op("Add", operand_as(graph, one, dtype), _scaled(graph, other, alpha, dtype))


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(graph: OnnxGraph, one: Operand | Number, other: Operand | Number, alpha: float = 1) -> Result:
    dtype = graph.result.dtype
    return graph.op("Sub", operand_as(graph, one, dtype), _scaled(graph, other, alpha, dtype))


@lowers(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(graph: OnnxGraph, one: Operand | Number, other: Operand | Number, alpha: float = 1) -> Result:
    dtype = graph.result.dtype
    return graph.op("Sub", operand_as(graph, other, dtype), _scaled(graph, one, alpha, dtype))


@lowers(aten.addcmul.default)
def addcmul(graph: OnnxGraph, operand: Operand, one: Operand, other: Operand, value: float = 1) -> Result:
    dtype = graph.result.dtype
    product = graph.op("Mul", _scaled(graph, one, value, dtype), operand_as(graph, other, dtype))
    return graph.op("Add", operand_as(graph, operand, dtype), product)


@lowers(aten.addcdiv.default)
def addcdiv(graph: OnnxGraph, operand: Operand, one: Operand, other: Operand, value: float = 1) -> Result:
    dtype = graph.result.dtype
    quotient = graph.op("Div", _scaled(graph, one, value, dtype), operand_as(graph, other, dtype))
    return graph.op("Add", operand_as(graph, operand, dtype), quotient)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(graph: OnnxGraph, start: Operand, end: Operand, weight: Operand | float) -> Result:
    """Start from the nearer end, as eager does, so that both ends are met exactly."""
    dtype = graph.result.dtype
    first, last, share = term(graph, start), term(graph, end), Term(graph, operand_as(graph, weight, dtype), dtype)
    distance = last - first
    from_start, from_end = first + share * distance, last - (1 - share) * distance
    if not isinstance(weight, Operand):
        return from_start if abs(weight) < 0.5 else from_end
    return from_start.where(abs(share) < 0.5, from_end)


@lowers(aten.pow.Tensor_Scalar)
def pow_scalar(graph: OnnxGraph, base: Operand, exponent: float) -> Result:
    value, dtype = graph.cast(base, graph.result.dtype), graph.result.dtype
    if exponent == 1:  # the gradient of a square
        return value
    if exponent == 2:
        return graph.op("Mul", value, value)
    if exponent == 3:
        return graph.op("Mul", graph.op("Mul", value, value), value)
    if not dtype.is_floating_point:
        raise NotLowerable("an integer power")
    if exponent == 0.5 and dtype != torch.float16:
        return root_of(Term(graph, value, dtype))
    if exponent == -0.5 and dtype != torch.float16:
        return graph.op("Reciprocal", root_of(Term(graph, value, dtype)))
    if exponent == -1:
        return graph.op("Reciprocal", value)
    if exponent == -2:
        return graph.op("Reciprocal", graph.op("Mul", value, value))
    return graph.op("Pow", value, graph.scalar(exponent, dtype))


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(graph: OnnxGraph, base: Operand | Number, exponent: Operand) -> Result:
    if not graph.result.dtype.is_floating_point:
        raise NotLowerable("an integer power")
    return binary(graph, "Pow", base, exponent)


def _integer_divisor(divisor: Operand | Number) -> None:
    """Refuse a divisor that may be zero: ONNX Runtime would end the process, where PyTorch raises an error."""
    is_size = isinstance(divisor, torch.SymInt) and known_positive(divisor)
    if not is_size and (not isinstance(divisor, int) or divisor in {0, -1}):
        raise NotLowerable("a division of integers by what may be zero")


def _operands(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> tuple[Term, Term]:
    """Return two numbers in the type of the result."""
    dtype = graph.result.dtype
    return Term(graph, operand_as(graph, one, dtype), dtype), Term(graph, operand_as(graph, other, dtype), dtype)


def _fmod(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> tuple[Term, Term, Term]:
    """Return the two numbers, and the remainder with the dividend's sign."""
    dividend, divisor = _operands(graph, one, other)
    return dividend, divisor, dividend.op("Mod", divisor, fmod=1)


def _signs_differ(remainder: Term, divisor: Term) -> Term:
    """True where a remainder is not zero and has another sign than the divisor."""
    return (remainder < 0).op("Xor", divisor < 0).op("And", remainder.equals(0).op("Not"))


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> Result:
    if graph.result.dtype.is_floating_point:
        return _fmod(graph, one, other)[2]
    _integer_divisor(other)  # ONNX Runtime computes fmod of integers in double precision, and their remainder exactly
    dividend, divisor = _operands(graph, one, other)
    rest = dividend.op("Mod", divisor)
    return (rest - divisor).where(_signs_differ(rest, dividend), rest)


@lowers(aten.remainder.Tensor, aten.remainder.Scalar)
def remainder(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> Result:
    if not graph.result.dtype.is_floating_point:
        _integer_divisor(other)
        return binary(graph, "Mod", one, other)
    _, divisor, rest = _fmod(graph, one, other)
    return (rest + divisor).where(_signs_differ(rest, divisor), rest)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(
    graph: OnnxGraph, one: Operand | Number, other: Operand | Number, rounding_mode: str | None = None
) -> Result:
    if rounding_mode is None:
        return div(graph, one, other)
    if rounding_mode == "floor":
        return floor_divide(graph, one, other)
    if graph.result.dtype.is_floating_point:
        return trunc_of(Term(graph, div(graph, one, other), graph.result.dtype))
    _integer_divisor(other)
    return binary(graph, "Div", one, other)


@lowers(aten.floor_divide.default)
def floor_divide(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> Result:
    dtype = graph.result.dtype
    if not dtype.is_floating_point:
        _integer_divisor(other)
        number = Term(graph, operand_as(graph, one, dtype), dtype)
        return (number - number.op("Mod", other)) / other
    dividend, divisor, rest = _fmod(graph, one, other)
    whole = (dividend - rest) / divisor
    exact = (whole - 1).where(_signs_differ(rest, divisor), whole).op("Round")
    return (dividend / divisor).where(divisor.equals(0), exact)


def _extreme(graph: OnnxGraph, op_type: str, one: Operand | Number, other: Operand | Number) -> Value:
    """Return the larger or smaller of two; NaN where either is."""
    dtype = graph.result.dtype
    if dtype == torch.bool:
        return binary(graph, "Or" if op_type == "Max" else "And", one, other)
    if dtype != torch.float16:
        return binary(graph, op_type, one, other)
    return extreme_of_two(graph, op_type, operand_as(graph, one, dtype), operand_as(graph, other, dtype), dtype)


def _extreme_lowering(op_type: str) -> Lowering:
    def lowering(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> Result:
        return _extreme(graph, op_type, one, other)

    return lowering


lowers(aten.maximum.default, aten.clamp_min.Tensor, aten.clamp_min.default)(_extreme_lowering("Max"))
lowers(aten.minimum.default, aten.clamp_max.Tensor, aten.clamp_max.default)(_extreme_lowering("Min"))


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(
    graph: OnnxGraph, operand: Operand, low: Operand | Number | None = None, high: Operand | Number | None = None
) -> Value:
    value = operand
    for bound, op_type in ((low, "Max"), (high, "Min")):
        if bound is not None:
            if isinstance(bound, float) and math.isnan(bound):
                raise NotLowerable("a clamp to NaN")
            value = Operand(_extreme(graph, op_type, value, bound), graph.result)
    return graph.cast(value, graph.result.dtype)


def _without_nan(op_type: str) -> Lowering:
    def lowering(graph: OnnxGraph, one: Operand, other: Operand) -> Result:
        dtype = graph.result.dtype
        value = _extreme(graph, op_type, one, other)
        if not dtype.is_floating_point:
            return value
        first, second = operand_as(graph, one, dtype), operand_as(graph, other, dtype)
        value = graph.op("Where", graph.op("IsNaN", first), second, value)
        return graph.op("Where", graph.op("IsNaN", second), first, value)

    return lowering


lowers(aten.fmax.default)(_without_nan("Max"))
lowers(aten.fmin.default)(_without_nan("Min"))


@lowers(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
def xlogy(graph: OnnxGraph, one: Operand | Number, other: Operand | Number) -> Result:
    dtype = graph.result.dtype
    factor, argument = (Term(graph, operand_as(graph, item, dtype), dtype) for item in (one, other))
    vanishes = factor.equals(0).op("And", argument.is_nan().op("Not"))
    return graph.op("Where", vanishes, graph.scalar(0, dtype), factor * log(argument))


@lowers(aten.logaddexp.default)
def logaddexp(graph: OnnxGraph, one: Operand, other: Operand) -> Result:
    dtype = graph.result.dtype
    first, second = term(graph, one, dtype), term(graph, other, dtype)
    larger = Term(graph, extreme_of_two(graph, "Max", first.value, second.value, dtype), dtype)
    both_infinite = first.equals(second).op("And", graph.op("IsInf", first))
    return first.where(both_infinite, larger + log1p_of(exp(-abs(first - second))))
