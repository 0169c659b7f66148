"""Captures bitsandbytes' linear layers as one operator each, with its gradient.

Those of 4 bits are in `kernels/linear_4bit.py`, and those of 8 bits in `kernels/linear_8bit.py`. A layer of 8 bits
multiplies with the dequantized weight while its model trains, and else quantizes its input, too.

Private to bitsandbytes; checked with bitsandbytes 0.50.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from ort_accel.capture.autograd_replacements import Replacement, capture_as_operators
from ort_accel.kernels.linear_4bit import NESTED_BLOCK, linear_4bit
from ort_accel.kernels.linear_8bit import linear_8bit, linear_8bit_mixed

if TYPE_CHECKING:

    class QuantState(Protocol):
        """Describes a quantized weight. The scales of its blocks may be quantized themselves, by `state2`."""

        absmax: Tensor
        blocksize: int
        code: Tensor
        dtype: torch.dtype
        nested: bool
        offset: Tensor
        quant_type: str
        shape: Sequence[int]
        state2: QuantState

    class MatmulState(Protocol):
        """Describes a layer of 8 bits: its weight as integers, the scale of each row, and where outliers begin."""

        CB: Tensor
        SCB: Tensor
        threshold: float


BITSANDBYTES_MODULE = "bitsandbytes.autograd._functions"


def capture_quantized_layers() -> None:
    """Capture the layers as operators, if bitsandbytes is imported."""
    functions = sys.modules.get(BITSANDBYTES_MODULE)
    if functions is None or not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        return
    captured = {
        "MatMul4Bit": Replacement(_linear_4bit, _is_suitable),
        "MatMul8bitFp": Replacement(_linear_8bit, _is_quantized),
        "MatMul8bitLt": Replacement(_linear_8bit_mixed, _is_quantized),
    }
    for name, replacement in captured.items():
        if function := getattr(functions, name, None):
            capture_as_operators(function, replacement)


def _is_suitable(arguments: Sequence[Any]) -> bool:
    """True for rows in a type that the layer computes in, without a tensor to write the output into."""
    x, _, out, *_ = arguments
    return isinstance(x, Tensor) and x.is_floating_point() and out is None


def _is_quantized(arguments: Sequence[Any]) -> bool:
    """True where the weight is given as integers. A layer may also quantize its weight in each step."""
    weight = arguments[1]
    return _is_suitable(arguments) and isinstance(weight, Tensor) and weight.dtype == torch.int8


def _linear_4bit(x: Tensor, packed: Tensor, out: None, bias: Tensor | None, state: QuantState) -> Tensor:  # noqa: ARG001
    codes, shape, kind = packed.view(-1, 1), list(state.shape), (state.blocksize, state.quant_type, bias)
    if not state.nested:
        return cast("Tensor", linear_4bit(x, codes, shape, state.absmax, *kind, None, None, None, state.dtype))
    if state.state2.blocksize != NESTED_BLOCK:
        raise NotImplementedError(f"bitsandbytes has scales in blocks of {NESTED_BLOCK} only")
    nested = state.absmax, state.state2.code, state.offset
    return cast("Tensor", linear_4bit(x, codes, shape, state.state2.absmax, *kind, *nested, state.dtype))


def _linear_8bit(x: Tensor, weight: Tensor, out: None, bias: Tensor | None, state: MatmulState) -> Tensor:  # noqa: ARG001
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if bias is None else bias.to(x.dtype)
    return cast("Tensor", linear_8bit(x, state.CB, state.SCB, bias))


def _linear_8bit_mixed(x: Tensor, weight: Tensor, out: None, bias: Tensor | None, state: MatmulState) -> Tensor:  # noqa: ARG001
    return cast("Tensor", linear_8bit_mixed(x, state.CB, state.SCB, bias, state.threshold))
