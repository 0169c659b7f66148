"""Checks for kernels of some ONNX Runtime releases that compute other numbers than PyTorch. Each check runs one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import onnx_ir as ir
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ort_accel.lowering.onnx_graph import OnnxGraph, Operand
from ort_accel.runtime.dlpack import to_ort
from ort_accel.runtime.session import Session, SessionSettings


@cache
def keeps(op_type: str, number: float, dtype: torch.dtype) -> bool:
    """True if an elementwise kernel returns this number unchanged, as it should: the root of infinity is infinity."""
    with _disable_current_modes():  # a lowering runs while the caller traces
        numbers = torch.full((64,), number, dtype=dtype)  # many, so that vector instructions are used
        return torch.allclose(_run(lambda graph, x: graph.op(op_type, x), numbers), numbers, equal_nan=True)


@cache
def layer_norm_is_exact() -> bool:
    """True if the kernel of layer norm is exact where the mean is large beside the deviation.

    onnxruntime-training 1.19.2 subtracts the squared mean from the mean square, which cancels.
    """
    with _disable_current_modes():
        numbers, scale = 1000 + torch.linspace(-1, 1, 64).reshape(1, 64), torch.ones(64)
        expected = torch.nn.functional.layer_norm(numbers, [64])
        given = _run(lambda graph, x: graph.op("LayerNormalization", x, graph.tensor(scale), axis=-1), numbers)
        return torch.allclose(given, expected, atol=1e-3)


def _run(write: Callable[[OnnxGraph, Operand], ir.Value], numbers: torch.Tensor) -> torch.Tensor:
    graph = OnnxGraph(opset=17)
    result = write(graph, graph.input("x", numbers))
    result.name = "y"
    model = ir.to_proto(graph.model([result], "kernel_bug")).SerializeToString()
    (given,) = Session(model, ["x"], ["y"], SessionSettings(threads=1))([to_ort(numbers)])
    return given
