"""Functions of single elements."""

from __future__ import annotations

import math

import torch

from ort_accel.lowering.kernel_bugs import keeps
from ort_accel.lowering.onnx_graph import NotLowerable, Number, OnnxGraph, Operand, Value
from ort_accel.lowering.registry import Lowering, lowers
from ort_accel.lowering.term import Result, Term, exp, floor, log, sign, tanh, term
from ort_accel.lowering.term import sigmoid as sigmoid_of

aten = torch.ops.aten


def operand_as(graph: OnnxGraph, item: Operand | Number, dtype: torch.dtype) -> Value:
    """Return a tensor or a number as a value of the given type."""
    return graph.cast(item, dtype) if isinstance(item, Operand) else graph.scalar(item, dtype)


def extreme_of_two(graph: OnnxGraph, op_type: str, first: Value, second: Value, dtype: torch.dtype) -> Value:
    """Return the `Max` or `Min` of two values, of float16 in single precision.

    Kernels for float16 ignore NaN. In onnxruntime-training 1.19.2, they write past the end of the result where the
    shapes differ.
    """
    wide = torch.float32 if dtype == torch.float16 else dtype
    value = graph.op(op_type, *(graph.cast_from(item, dtype, wide) for item in (first, second)))
    return graph.cast_from(value, wide, dtype)


def common_dtype(one: Operand | Number, other: Operand | Number) -> torch.dtype:
    """Return the type that PyTorch computes in for these tensors and numbers."""
    first, second = (item.fake if isinstance(item, Operand) else item for item in (one, other))
    return torch.result_type(first, second)  # type: ignore[arg-type]  # which takes sizes, too


def _unary(op_type: str) -> Lowering:
    def lowering(graph: OnnxGraph, operand: Operand) -> Result:
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
    aten.relu.default: "Relu",
    aten.abs.default: "Abs",
}.items():
    lowers(target)(_unary(name))


def _rounding(op_type: str) -> Lowering:
    def lowering(graph: OnnxGraph, operand: Operand) -> Result:
        return graph.op(op_type, operand) if operand.dtype.is_floating_point else operand.value

    return lowering


for target, name in {aten.floor.default: "Floor", aten.ceil.default: "Ceil", aten.round.default: "Round"}.items():
    lowers(target)(_rounding(name))


def trunc_of(x: Term) -> Term:
    """Round towards zero."""
    return sign(x) * floor(abs(x))


@lowers(aten.trunc.default)
def trunc(graph: OnnxGraph, operand: Operand) -> Result:
    return trunc_of(term(graph, operand)) if operand.dtype.is_floating_point else operand.value


@lowers(aten.frac.default)
def frac(graph: OnnxGraph, operand: Operand) -> Result:
    x = term(graph, operand)
    return x - trunc_of(x)


@lowers(aten.sign.default, aten.sgn.default)
def sgn(graph: OnnxGraph, operand: Operand) -> Result:
    """Return zero for NaN, where ONNX returns NaN."""
    x = term(graph, operand)
    if not operand.dtype.is_floating_point:
        return sign(x)
    return graph.op("Where", x.is_nan(), graph.scalar(0, operand.dtype), sign(x))


def root_of(x: Term) -> Term:
    """Return the square root. Some runtimes give NaN for that of infinity."""
    root = x.op("Sqrt")
    if keeps("Sqrt", math.inf, x.dtype):
        return root
    return x.where(x.graph.op("IsInf", x, detect_negative=0), root)


@lowers(aten.sigmoid.default)
def sigmoid(graph: OnnxGraph, operand: Operand) -> Result:
    return sigmoid_of(term(graph, operand, graph.result.dtype))


@lowers(aten.sqrt.default)
def sqrt(graph: OnnxGraph, operand: Operand) -> Result:
    return root_of(term(graph, operand, graph.result.dtype))


@lowers(aten.rsqrt.default)
def rsqrt(graph: OnnxGraph, operand: Operand) -> Result:
    return graph.op("Reciprocal", sqrt(graph, operand))


def erf_of(x: Term) -> Term:
    """Return the error function. Some runtimes give 1 for that of NaN."""
    result = x.op("Erf")
    return result if keeps("Erf", math.nan, x.dtype) else x.where(x.is_nan(), result)


@lowers(aten.erf.default)
def erf(graph: OnnxGraph, operand: Operand) -> Result:
    return erf_of(term(graph, operand, graph.result.dtype))


def log1p_of(x: Term) -> Term:
    """Return log(1 + x), exact for small x: the error of rounding 1 + x is divided out."""
    above = x + 1
    plain = log(above)
    exact = plain * (x / (above - 1))
    loses_one = above.equals(x)  # infinity, and numbers beside which 1 is lost
    return x.where(above.equals(1), plain.where(loses_one, exact))


@lowers(aten.log1p.default)
def log1p(graph: OnnxGraph, operand: Operand) -> Result:
    return log1p_of(term(graph, operand, graph.result.dtype))


def expm1_of(x: Term) -> Term:
    """Return exp(x) - 1, exact for small x: tanh(x / 2) * (exp(x) + 1), and the plain difference elsewhere."""
    power = exp(x)
    return (tanh(x * 0.5) * (power + 1)).where(abs(x) < 1, power - 1)


@lowers(aten.expm1.default)
def expm1(graph: OnnxGraph, operand: Operand) -> Result:
    return expm1_of(term(graph, operand, graph.result.dtype))


def _logarithm(base: float) -> Lowering:
    """Computes in double precision, so that the logarithm of a power of the base is a whole number."""

    def lowering(graph: OnnxGraph, operand: Operand) -> Value:
        found = log(term(graph, operand, torch.float64)) * (1 / math.log(base))
        return graph.cast_from(found.value, torch.float64, graph.result.dtype)

    return lowering


lowers(aten.log2.default)(_logarithm(2))
lowers(aten.log10.default)(_logarithm(10))


def _scaled(factor: float) -> Lowering:
    def lowering(graph: OnnxGraph, operand: Operand) -> Result:
        return term(graph, operand, graph.result.dtype) * factor

    return lowering


lowers(aten.deg2rad.default)(_scaled(math.pi / 180))
lowers(aten.rad2deg.default)(_scaled(180 / math.pi))


@lowers(aten.exp2.default)
def exp2(graph: OnnxGraph, operand: Operand) -> Result:
    dtype = graph.result.dtype
    return graph.op("Pow", graph.scalar(2, dtype), graph.cast(operand, dtype))


@lowers(aten.nan_to_num.default)
def nan_to_num(
    graph: OnnxGraph, operand: Operand, nan: float | None = None, high: float | None = None, low: float | None = None
) -> Result:
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


def _test(op_type: str) -> Lowering:
    def lowering(graph: OnnxGraph, operand: Operand) -> Result:
        if not operand.dtype.is_floating_point:
            raise NotLowerable("a test for NaN or infinity among integers")
        return graph.op(op_type, operand)

    return lowering


lowers(aten.isnan.default)(_test("IsNaN"))
lowers(aten.isinf.default)(_test("IsInf"))
