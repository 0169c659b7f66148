"""A linear layer whose frozen weight is packed in 4-bit codes by bitsandbytes, as one operator with its gradient.

The arguments are those of `bitsandbytes::gemm_4bit`, and the type in which the layer's gradient takes the weight. The
native kernel dequantizes panels of the weight while it multiplies. Elsewhere bitsandbytes' own operators compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.library import register_autograd

from ort_accel.kernels.kernel_call import KernelCall, Output, chosen_for, element_of, fake_of
from ort_accel.kernels.library import ANY_DEVICE, define, fake
from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import ELEMENTS, run_kernel

own = torch.ops.ort_accel

NESTED_BLOCK = 256
"""The scales in one block, where they are quantized themselves."""

_WEIGHT = "Tensor packed, int[] shape, Tensor absmax, int blocksize, str quant_type"
_NESTED = "Tensor? absmax_8bit, Tensor? absmax_code, Tensor? absmax_offset, ScalarType weight_dtype"


def has_kernel(x: Tensor, shape: Sequence[int], blocksize: int) -> bool:
    """True if the native kernel multiplies these rows with a weight of this shape.

    Where a block goes on in a second row, bitsandbytes' kernels of different processors disagree about the scales.
    """
    is_known = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    return is_known and shape[1] % blocksize == 0 and native_library() is not None


def parts_of_float() -> int:
    """Returns as the sum of how many bfloat16 numbers a kernel may take a float: three hold all of its bits.

    `torch.set_float32_matmul_precision("high")` allows two, and "medium" one.
    """
    return {"high": 2, "medium": 1}.get(torch.get_float32_matmul_precision(), 3)


def _linear_4bit(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None,
    absmax_8bit: Tensor | None,
    absmax_code: Tensor | None,
    absmax_offset: Tensor | None,
    weight_dtype: torch.dtype,
) -> Tensor:
    nested = absmax_8bit, absmax_code, absmax_offset
    if not has_kernel(x, shape, blocksize):
        product: Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
            x, packed, shape, absmax, blocksize, quant_type, bias, *nested
        )
        return product
    x, element = x.contiguous(), ELEMENTS[x.dtype]
    result = x.new_empty((*x.shape[:-1], shape[0]))
    rows = result.numel() // shape[0]
    weight = packed, absmax, *nested, blocksize, int(quant_type == "fp4")
    run_kernel("linear_4bit", x, *weight, rows, *shape, element, parts_of_float(), bias, result)
    return result


def _linear_4bit_backward(
    grad: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    absmax_8bit: Tensor | None,
    absmax_code: Tensor | None,
    absmax_offset: Tensor | None,
    weight_dtype: torch.dtype,
) -> Tensor:
    nested = absmax_8bit, absmax_code, absmax_offset
    if not has_kernel(grad, shape, blocksize):
        scales = _scales(absmax, *nested)
        weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            packed, scales, blocksize, quant_type, shape, weight_dtype
        )
        return grad @ weight.to(grad.dtype)
    grad, element = grad.contiguous(), ELEMENTS[grad.dtype]
    result = grad.new_empty((*grad.shape[:-1], shape[1]))
    rows = result.numel() // shape[1]
    arguments = packed, absmax, *nested, blocksize, int(quant_type == "fp4"), rows, *shape
    run_kernel("linear_4bit_backward", grad, *arguments, element, ELEMENTS[weight_dtype], parts_of_float(), result)
    return result


def _scales(
    absmax: Tensor, absmax_8bit: Tensor | None, absmax_code: Tensor | None, absmax_offset: Tensor | None
) -> Tensor:
    """Returns the largest number of each block."""
    if absmax_8bit is None or absmax_offset is None:
        return absmax
    products: Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
        absmax_8bit, absmax, absmax_code, NESTED_BLOCK, torch.float32
    )
    return products + absmax_offset


define(f"linear_4bit(Tensor x, {_WEIGHT}, Tensor? bias, {_NESTED}) -> Tensor", _linear_4bit, ANY_DEVICE)
define(f"linear_4bit_backward(Tensor grad, {_WEIGHT}, {_NESTED}) -> Tensor", _linear_4bit_backward, ANY_DEVICE)


@fake("linear_4bit")
def _(x: Tensor, _packed: Tensor, shape: Sequence[int], *_: object) -> Tensor:
    torch._check(x.shape[-1] == shape[1])  # type: ignore[no-untyped-call]
    return x.new_empty((*x.shape[:-1], shape[0]))


@fake("linear_4bit_backward")
def _(grad: Tensor, _packed: Tensor, shape: Sequence[int], *_: object) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, shape, absmax, blocksize, quant_type, bias, *nested, weight_dtype = inputs
    ctx.save_for_backward(packed, absmax, *nested)
    ctx.numbers = shape, blocksize, quant_type, weight_dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    packed, absmax, *nested = ctx.saved_tensors
    shape, blocksize, quant_type, weight_dtype = ctx.numbers
    to_x = to_bias = None
    if ctx.needs_input_grad[0]:
        to_x = own.linear_4bit_backward(grad, packed, shape, absmax, blocksize, quant_type, *nested, weight_dtype)
    if ctx.needs_input_grad[6]:
        to_bias = grad.sum(list(range(grad.ndim - 1)), dtype=ctx.bias_dtype)
    return to_x, None, None, None, None, None, to_bias, None, None, None, None


register_autograd("ort_accel::linear_4bit", _differentiate, setup_context=_save)

linear_4bit = own.linear_4bit.default
"""The layer's output."""

linear_4bit_backward = own.linear_4bit_backward.default
"""The gradient of the layer's input."""


@chosen_for(own.linear_4bit.default)
def _linear_4bit_call(
    node: fx.Node,
    x: fx.Node,
    packed: fx.Node,
    shape: Sequence[int],
    absmax: fx.Node,
    blocksize: int,
    quant_type: str,
    bias: fx.Node | None,
    absmax_8bit: fx.Node | None,
    absmax_code: fx.Node | None,
    absmax_offset: fx.Node | None,
    *_: torch.dtype,
) -> KernelCall | None:
    element = element_of(x, bias or x)
    if element is None or not has_kernel(fake_of(x), shape, blocksize):
        return None
    weight = packed, absmax, absmax_8bit, absmax_code, absmax_offset, blocksize, int(quant_type == "fp4")
    rows = prod(fake_of(node).shape[:-1])
    return KernelCall("linear_4bit", (x, *weight, rows, *shape, element, parts_of_float(), bias, Output(0)))


@chosen_for(own.linear_4bit_backward.default)
def _linear_4bit_backward_call(
    node: fx.Node,
    grad: fx.Node,
    packed: fx.Node,
    shape: Sequence[int],
    absmax: fx.Node,
    blocksize: int,
    quant_type: str,
    absmax_8bit: fx.Node | None,
    absmax_code: fx.Node | None,
    absmax_offset: fx.Node | None,
    weight_dtype: torch.dtype,
) -> KernelCall | None:
    if not has_kernel(fake_of(grad), shape, blocksize):
        return None
    weight = packed, absmax, absmax_8bit, absmax_code, absmax_offset, blocksize, int(quant_type == "fp4")
    elements = ELEMENTS[fake_of(grad).dtype], ELEMENTS[weight_dtype]
    rows = prod(fake_of(node).shape[:-1])
    return KernelCall("linear_4bit_backward", (grad, *weight, rows, *shape, *elements, parts_of_float(), Output(0)))
