"""Functions of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch

from ort_accel.lowering.kernel_bugs import keeps
from ort_accel.lowering.onnx_graph import NotLowerable, OnnxGraph, Operand
from ort_accel.lowering.registry import lowers

aten = torch.ops.aten


def operand_as(graph: OnnxGraph, item: Any, dtype: torch.dtype) -> Any:
    """A tensor or a number as a value of the given type."""
    return graph.cast(item, dtype) if isinstance(item, Operand) else graph.scalar(item, dtype)


def extreme_of_two(graph: OnnxGraph, op_type: str, first: Any, second: Any, dtype: torch.dtype) -> Any:
    """`Max` or `Min` of two values.

    Kernels for float16 do not heed NaN, and those of onnxruntime-training 1.19.2 write past the end of the result where
    the shapes differ, which ends the process sooner or later.
    """
    wide = torch.float32 if dtype == torch.float16 else dtype
    value = graph.op(op_type, *(graph.cast_from(item, dtype, wide) for item in (first, second)))
    return graph.cast_from(value, wide, dtype)


def common_dtype(*items: Any) -> torch.dtype:
    """The type that PyTorch computes in for these tensors and numbers."""
    stand_ins = [item.fake if isinstance(item, Operand) else item for item in items]
    if len(stand_ins) == 1:
        return stand_ins[0].dtype
    return torch.result_type(*stand_ins)


def _unary(op_type: str) -> Any:
    def lowering(graph: OnnxGraph, operand: Operand) -> Any:
        return graph.op(op_type, graph.cast(operand, graph.result.dtype))

    return lowering


for target, name in {
    aten.neg.default: "Neg",
    aten.exp.default: "Exp",
    aten.log.default: "Log",
    aten.reciprocal.default: "Reciprocal",
    aten.sin.default: "Sin",
    aten.cos.default: "Cos",
    aten.tan.default: "Tan",
    aten.asin.default: "Asin",
    aten.acos.default: "Acos",
    aten.atan.default: "Atan",
    aten.sinh.default: "Sinh",
    aten.cosh.default: "Cosh",
    aten.asinh.default: "Asinh",
    aten.acosh.default: "Acosh",
    aten.atanh.default: "Atanh",
    aten.tanh.default: "Tanh",
    aten.sigmoid.default: "Sigmoid",
    aten.relu.default: "Relu",
    aten.abs.default: "Abs",
}.items():
    lowers(target)(_unary(name))


def _rounding(op_type: str) -> Any:
    def lowering(graph: OnnxGraph, operand: Operand) -> Any:
        return graph.op(op_type, operand) if operand.dtype.is_floating_point else operand.value

    return lowering


for target, name in {aten.floor.default: "Floor", aten.ceil.default: "Ceil", aten.round.default: "Round"}.items():
    lowers(target)(_rounding(name))


def trunc_of(graph: OnnxGraph, value: Any) -> Any:
    """Rounding towards zero."""
    return graph.op("Mul", graph.op("Sign", value), graph.op("Floor", graph.op("Abs", value)))


@lowers(aten.trunc.default)
def trunc(graph: OnnxGraph, operand: Operand) -> Any:
    return trunc_of(graph, operand) if operand.dtype.is_floating_point else operand.value


@lowers(aten.frac.default)
def frac(graph: OnnxGraph, operand: Operand) -> Any:
    return graph.op("Sub", operand, trunc_of(graph, operand))


@lowers(aten.sign.default, aten.sgn.default)
def sign(graph: OnnxGraph, operand: Operand) -> Any:
    """Zero for NaN, where ONNX has NaN."""
    value = graph.op("Sign", operand)
    if not operand.dtype.is_floating_point:
        return value
    return graph.op("Where", graph.op("IsNaN", operand), graph.scalar(0, operand.dtype), value)


def root_of(graph: OnnxGraph, value: Any, dtype: torch.dtype) -> Any:
    """The square root. Some runtimes give NaN for that of infinity."""
    root = graph.op("Sqrt", value)
    if keeps("Sqrt", math.inf, dtype):
        return root
    return graph.op("Where", graph.op("IsInf", value, detect_negative=0), value, root)


@lowers(aten.sqrt.default)
def sqrt(graph: OnnxGraph, operand: Operand) -> Any:
    return root_of(graph, graph.cast(operand, graph.result.dtype), graph.result.dtype)


@lowers(aten.rsqrt.default)
def rsqrt(graph: OnnxGraph, operand: Operand) -> Any:
    return graph.op("Reciprocal", sqrt(graph, operand))


def erf_of(graph: OnnxGraph, value: Any, dtype: torch.dtype) -> Any:
    """The error function. Some runtimes give 1 for that of NaN."""
    result = graph.op("Erf", value)
    return result if keeps("Erf", math.nan, dtype) else graph.op("Where", graph.op("IsNaN", value), value, result)


@lowers(aten.erf.default)
def erf(graph: OnnxGraph, operand: Operand) -> Any:
    return erf_of(graph, graph.cast(operand, graph.result.dtype), graph.result.dtype)


def log1p_of(graph: OnnxGraph, value: Any, dtype: torch.dtype) -> Any:
    """log(1 + x), exact for small x: the error of rounding 1 + x is divided out."""
    one = graph.scalar(1, dtype)
    sum_ = graph.op("Add", value, one)
    log = graph.op("Log", sum_)
    mended = graph.op("Mul", log, graph.op("Div", value, graph.op("Sub", sum_, one)))
    no_mending = graph.op("Equal", sum_, value)  # infinity, and where 1 is lost
    return graph.op("Where", graph.op("Equal", sum_, one), value, graph.op("Where", no_mending, log, mended))


@lowers(aten.log1p.default)
def log1p(graph: OnnxGraph, operand: Operand) -> Any:
    return log1p_of(graph, graph.cast(operand, graph.result.dtype), graph.result.dtype)


def expm1_of(graph: OnnxGraph, value: Any, dtype: torch.dtype) -> Any:
    """exp(x) - 1, exact for small x: tanh(x / 2) * (exp(x) + 1), and where exp(x) is large, the plain difference."""
    one = graph.scalar(1, dtype)
    power = graph.op("Exp", value)
    half = graph.op("Tanh", graph.op("Mul", value, graph.scalar(0.5, dtype)))
    small = graph.op("Less", graph.op("Abs", value), one)
    return graph.op("Where", small, graph.op("Mul", half, graph.op("Add", power, one)), graph.op("Sub", power, one))


@lowers(aten.expm1.default)
def expm1(graph: OnnxGraph, operand: Operand) -> Any:
    return expm1_of(graph, graph.cast(operand, graph.result.dtype), graph.result.dtype)


def _scaled(op_type: str | None, factor: float) -> Any:
    def lowering(graph: OnnxGraph, operand: Operand) -> Any:
        dtype = graph.result.dtype
        value = graph.cast(operand, dtype)
        return graph.op("Mul", graph.op(op_type, value) if op_type else value, graph.scalar(factor, dtype))

    return lowering


for target, (function, factor) in {
    aten.log2.default: ("Log", 1 / math.log(2)),
    aten.log10.default: ("Log", 1 / math.log(10)),
    aten.deg2rad.default: (None, math.pi / 180),
    aten.rad2deg.default: (None, 180 / math.pi),
}.items():
    lowers(target)(_scaled(function, factor))


@lowers(aten.exp2.default)
def exp2(graph: OnnxGraph, operand: Operand) -> Any:
    dtype = graph.result.dtype
    return graph.op("Pow", graph.scalar(2, dtype), graph.cast(operand, dtype))


@lowers(aten.nan_to_num.default)
def nan_to_num(
    graph: OnnxGraph, operand: Operand, nan: float | None = None, high: float | None = None, low: float | None = None
) -> Any:
    dtype = operand.dtype
    if not dtype.is_floating_point:
        return operand.value
    limits = torch.finfo(dtype)
    numbers = [0 if nan is None else nan, limits.max if high is None else high, limits.min if low is None else low]
    tests = [
        graph.op("IsNaN", operand),
        graph.op("IsInf", operand, detect_negative=0),
        graph.op("IsInf", operand, detect_positive=0),
    ]
    value = operand.value
    for test, number in zip(tests, numbers, strict=True):
        value = graph.op("Where", test, graph.scalar(number, dtype), value)
    return value


def _test(op_type: str) -> Any:
    def lowering(graph: OnnxGraph, operand: Operand) -> Any:
        if not operand.dtype.is_floating_point:
            raise NotLowerable("a test for NaN or infinity among integers")
        return graph.op(op_type, operand)

    return lowering


lowers(aten.isnan.default)(_test("IsNaN"))
lowers(aten.isinf.default)(_test("IsInf"))
