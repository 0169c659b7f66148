"""Arithmetic of two or more tensors."""

from __future__ import annotations

import math
from typing import Any

import torch

from ort_accel.graph.symbolic_sizes import known_positive
from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand
from ort_accel.lowering.ops.elementwise import extreme_of_two, log1p_of, operand_as, root_of, trunc_of
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


def binary(graph: OnnxGraph, op_type: str, one: Any, other: Any) -> Any:
    """An operator on two tensors or numbers, in the type of the result."""
    dtype = graph.result.dtype
    return graph.op(op_type, operand_as(graph, one, dtype), operand_as(graph, other, dtype))


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(graph: OnnxGraph, one: Any, other: Any) -> Any:
    return binary(graph, "And" if graph.result.dtype == torch.bool else "Mul", one, other)


@lowers(aten.div.Tensor, aten.div.Scalar)
def div(graph: OnnxGraph, one: Any, other: Any) -> Any:
    return binary(graph, "Div", one, other)


def _scaled(graph: OnnxGraph, item: Any, alpha: float, dtype: torch.dtype) -> Any:
    value = operand_as(graph, item, dtype)
    return value if alpha == 1 else graph.op("Mul", value, graph.scalar(alpha, dtype))


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(graph: OnnxGraph, one: Any, other: Any, alpha: float = 1) -> Any:
    dtype = graph.result.dtype
    if dtype == torch.bool:
        return binary(graph, "Or", one, other)
    if isinstance(other, int | float) and other * alpha == 0 and one.dtype == dtype:
        return one.value
    return graph.op("Add", operand_as(graph, one, dtype), _scaled(graph, other, alpha, dtype))


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(graph: OnnxGraph, one: Any, other: Any, alpha: float = 1) -> Any:
    dtype = graph.result.dtype
    return graph.op("Sub", operand_as(graph, one, dtype), _scaled(graph, other, alpha, dtype))


@lowers(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(graph: OnnxGraph, one: Any, other: Any, alpha: float = 1) -> Any:
    dtype = graph.result.dtype
    return graph.op("Sub", operand_as(graph, other, dtype), _scaled(graph, one, alpha, dtype))


@lowers(aten.addcmul.default)
def addcmul(graph: OnnxGraph, operand: Operand, one: Operand, other: Operand, value: float = 1) -> Any:
    dtype = graph.result.dtype
    product = graph.op("Mul", _scaled(graph, one, value, dtype), operand_as(graph, other, dtype))
    return graph.op("Add", operand_as(graph, operand, dtype), product)


@lowers(aten.addcdiv.default)
def addcdiv(graph: OnnxGraph, operand: Operand, one: Operand, other: Operand, value: float = 1) -> Any:
    dtype = graph.result.dtype
    quotient = graph.op("Div", _scaled(graph, one, value, dtype), operand_as(graph, other, dtype))
    return graph.op("Add", operand_as(graph, operand, dtype), quotient)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(graph: OnnxGraph, start: Operand, end: Operand, weight: Any) -> Any:
    """From whichever end is nearer, as eager does, so that both ends are met exactly."""
    dtype = graph.result.dtype
    way, share, one = graph.op("Sub", end, start), operand_as(graph, weight, dtype), graph.scalar(1, dtype)
    from_start = graph.op("Add", start, graph.op("Mul", share, way))
    from_end = graph.op("Sub", end, graph.op("Mul", graph.op("Sub", one, share), way))
    if not isinstance(weight, Operand):
        return from_start if abs(weight) < 0.5 else from_end
    near = graph.op("Less", graph.op("Abs", share), graph.scalar(0.5, dtype))
    return graph.op("Where", near, from_start, from_end)


@lowers(aten.pow.Tensor_Scalar)
def pow_scalar(graph: OnnxGraph, base: Operand, exponent: float) -> Any:
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
        return root_of(graph, value, dtype)
    if exponent == -0.5 and dtype != torch.float16:
        return graph.op("Reciprocal", root_of(graph, value, dtype))
    if exponent == -1:
        return graph.op("Reciprocal", value)
    if exponent == -2:
        return graph.op("Reciprocal", graph.op("Mul", value, value))
    return graph.op("Pow", value, graph.scalar(exponent, dtype))


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(graph: OnnxGraph, base: Any, exponent: Operand) -> Any:
    if not graph.result.dtype.is_floating_point:
        raise NotLowerable("an integer power")
    return binary(graph, "Pow", base, exponent)


def _integer_divisor(divisor: Any) -> None:
    """A division by zero would end the process, where PyTorch raises an error."""
    is_size = isinstance(divisor, torch.SymInt) and known_positive(divisor)
    if not is_size and (not isinstance(divisor, int) or divisor in {0, -1}):
        raise NotLowerable("a division of integers by what may be zero")


def _fmod(graph: OnnxGraph, one: Any, other: Any) -> tuple[Any, Any, Any]:
    """The two numbers, and the remainder that has the dividend's sign."""
    dtype = graph.result.dtype
    dividend, divisor = operand_as(graph, one, dtype), operand_as(graph, other, dtype)
    return dividend, divisor, graph.op("Mod", dividend, divisor, fmod=1)


def _signs_differ(graph: OnnxGraph, remainder: Any, divisor: Any) -> Any:
    """Where a remainder is not zero and has another sign than the divisor."""
    zero = graph.scalar(0, graph.result.dtype)
    differ = graph.op("Xor", graph.op("Less", remainder, zero), graph.op("Less", divisor, zero))
    return graph.op("And", differ, graph.op("Not", graph.op("Equal", remainder, zero)))


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(graph: OnnxGraph, one: Any, other: Any) -> Any:
    if not graph.result.dtype.is_floating_point:
        _integer_divisor(other)
    return _fmod(graph, one, other)[2]


@lowers(aten.remainder.Tensor, aten.remainder.Scalar)
def remainder(graph: OnnxGraph, one: Any, other: Any) -> Any:
    if not graph.result.dtype.is_floating_point:
        _integer_divisor(other)
        return binary(graph, "Mod", one, other)
    _, divisor, rest = _fmod(graph, one, other)
    return graph.op("Where", _signs_differ(graph, rest, divisor), graph.op("Add", rest, divisor), rest)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(graph: OnnxGraph, one: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return div(graph, one, other)
    if rounding_mode == "floor":
        return floor_divide(graph, one, other)
    if graph.result.dtype.is_floating_point:
        return trunc_of(graph, div(graph, one, other))
    _integer_divisor(other)
    return binary(graph, "Div", one, other)


@lowers(aten.floor_divide.default)
def floor_divide(graph: OnnxGraph, one: Any, other: Any) -> Any:
    dtype = graph.result.dtype
    if not dtype.is_floating_point:
        _integer_divisor(other)
        rest = graph.op("Mod", operand_as(graph, one, dtype), graph.scalar(other, dtype))
        return graph.op("Div", graph.op("Sub", operand_as(graph, one, dtype), rest), graph.scalar(other, dtype))
    dividend, divisor, rest = _fmod(graph, one, other)
    whole = graph.op("Div", graph.op("Sub", dividend, rest), divisor)
    lower = graph.op("Sub", whole, graph.scalar(1, dtype))
    exact = graph.op("Round", graph.op("Where", _signs_differ(graph, rest, divisor), lower, whole))
    by_zero = graph.op("Equal", divisor, graph.scalar(0, dtype))
    return graph.op("Where", by_zero, graph.op("Div", dividend, divisor), exact)


def _extreme(graph: OnnxGraph, op_type: str, one: Any, other: Any) -> Any:
    """The larger or smaller of two; NaN where either is."""
    dtype = graph.result.dtype
    if dtype == torch.bool:
        return binary(graph, "Or" if op_type == "Max" else "And", one, other)
    if dtype != torch.float16:
        return binary(graph, op_type, one, other)
    return extreme_of_two(graph, op_type, operand_as(graph, one, dtype), operand_as(graph, other, dtype), dtype)


def extreme(op_type: str) -> Any:
    """A lowering to `Max` or `Min`."""

    def lowering(graph: OnnxGraph, one: Any, other: Any) -> Any:
        return _extreme(graph, op_type, one, other)

    return lowering


lowers(aten.maximum.default, aten.clamp_min.Tensor, aten.clamp_min.default)(extreme("Max"))
lowers(aten.minimum.default, aten.clamp_max.Tensor, aten.clamp_max.default)(extreme("Min"))


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(graph: OnnxGraph, operand: Operand, low: Any = None, high: Any = None) -> Any:
    value: Any = operand
    for bound, op_type in ((low, "Max"), (high, "Min")):
        if bound is not None:
            if isinstance(bound, float) and math.isnan(bound):
                raise NotLowerable("a clamp to NaN")
            value = Operand(_extreme(graph, op_type, value, bound), graph.result)
    return graph.cast(value, graph.result.dtype)


def _without_nan(op_type: str) -> Any:
    def lowering(graph: OnnxGraph, one: Operand, other: Operand) -> Any:
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
def xlogy(graph: OnnxGraph, one: Any, other: Any) -> Any:
    dtype = graph.result.dtype
    factor, argument = operand_as(graph, one, dtype), operand_as(graph, other, dtype)
    nothing = graph.op("Equal", factor, graph.scalar(0, dtype))
    vanishes = graph.op("And", nothing, graph.op("Not", graph.op("IsNaN", argument)))
    return graph.op("Where", vanishes, graph.scalar(0, dtype), graph.op("Mul", factor, graph.op("Log", argument)))


@lowers(aten.logaddexp.default)
def logaddexp(graph: OnnxGraph, one: Operand, other: Operand) -> Any:
    dtype = graph.result.dtype
    first, second = operand_as(graph, one, dtype), operand_as(graph, other, dtype)
    gap = graph.op("Neg", graph.op("Abs", graph.op("Sub", first, second)))
    larger = extreme_of_two(graph, "Max", first, second, dtype)
    total = graph.op("Add", larger, log1p_of(graph, graph.op("Exp", gap), dtype))
    both_infinite = graph.op("And", graph.op("Equal", first, second), graph.op("IsInf", first))
    return graph.op("Where", both_infinite, first, total)
