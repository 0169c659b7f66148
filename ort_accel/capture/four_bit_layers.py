"""Captures bitsandbytes' 4-bit linear layers as one operator (`kernels/linear_4bit.py`), with its gradient.

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


BITSANDBYTES_MODULE = "bitsandbytes.autograd._functions"


def capture_four_bit_layers() -> None:
    """Capture the layers as operators, if bitsandbytes is imported."""
    functions = sys.modules.get(BITSANDBYTES_MODULE)
    function = getattr(functions, "MatMul4Bit", None)
    if function is not None and hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        capture_as_operators(function, Replacement(_linear, _is_suitable))


def _is_suitable(arguments: Sequence[Any]) -> bool:
    """True for rows in a type that the layer computes in, without a tensor to write the output into."""
    x, _, out, *_ = arguments
    return isinstance(x, Tensor) and x.is_floating_point() and out is None


def _linear(x: Tensor, packed: Tensor, out: None, bias: Tensor | None, state: QuantState) -> Tensor:  # noqa: ARG001
    codes, shape, kind = packed.view(-1, 1), list(state.shape), (state.blocksize, state.quant_type, bias)
    if not state.nested:
        return cast("Tensor", linear_4bit(x, codes, shape, state.absmax, *kind, None, None, None, state.dtype))
    if state.state2.blocksize != NESTED_BLOCK:
        raise NotImplementedError(f"bitsandbytes has scales in blocks of {NESTED_BLOCK} only")
    nested = state.absmax, state.state2.code, state.offset
    return cast("Tensor", linear_4bit(x, codes, shape, state.state2.absmax, *kind, *nested, state.dtype))
