"""Rotary embeddings, and their gradient."""

from __future__ import annotations

from ort_accel.kernels.rotary import own
from ort_accel.lowering.onnx_graph import OnnxGraph, Operand
from ort_accel.lowering.registry import lowers
from ort_accel.lowering.term import Term, term


def _halves(graph: OnnxGraph, x: Term, operand: Operand) -> tuple[Term, Term]:
    half = operand.shape[-1] // 2
    low, high = graph.op_with_outputs("Split", 2, x, graph.sizes([half, half]), axis=-1)
    return Term(graph, low, x.dtype), Term(graph, high, x.dtype)


@lowers(own.rotary.default)
def rotary(graph: OnnxGraph, operand: Operand, cosines: Operand, sines: Operand) -> Term:
    x = term(graph, operand)
    low, high = _halves(graph, x, operand)
    return x * cosines + (-high).op("Concat", low, axis=-1) * sines


@lowers(own.rotary_backward.default)
def rotary_backward(graph: OnnxGraph, operand: Operand, cosines: Operand, sines: Operand) -> Term:
    grad = term(graph, operand)
    low, high = _halves(graph, grad * sines, operand)
    return grad * cosines + high.op("Concat", -low, axis=-1)
