"""A linear layer whose frozen weight is quantized to 8-bit integers by bitsandbytes, as one operator with its gradient.

A row of the weight has one scale. The native kernel dequantizes panels of the weight while it multiplies. Elsewhere
PyTorch multiplies with the dequantized weight, as bitsandbytes does. A second operator quantizes the input, too, except
for columns with outliers, by bitsandbytes' own operators. Its gradient is the first one's.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.library import register_autograd
from torch.nn import functional

from ort_accel.kernels.kernel_call import KernelCall, Output, chosen_for, element_of, fake_of
from ort_accel.kernels.library import ANY_DEVICE, define, fake
from ort_accel.kernels.linear_4bit import parts_of_float
from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import ELEMENTS, run_kernel

own = torch.ops.ort_accel


def has_kernel(x: Tensor, scales: Tensor) -> bool:
    """True if the native kernel multiplies these rows with a weight of these scales."""
    is_known = x.dtype in (torch.float32, torch.bfloat16) and scales.dtype == torch.float32
    return is_known and x.device.type == "cpu" and native_library() is not None


def _dequantized(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype).mul_(scales.unsqueeze(1) * (1.0 / 127.0))


def _linear_8bit(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    if not has_kernel(x, scales):
        return functional.linear(x, _dequantized(codes, scales, x.dtype), bias)
    x, result = x.contiguous(), x.new_empty((*x.shape[:-1], codes.shape[0]))
    rows = result.numel() // codes.shape[0]
    run_kernel("linear_8bit", x, codes, scales, rows, *codes.shape, ELEMENTS[x.dtype], parts_of_float(), bias, result)
    return result


def _linear_8bit_backward(grad: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    if not has_kernel(grad, scales):
        return grad @ _dequantized(codes, scales, grad.dtype)
    grad, result = grad.contiguous(), grad.new_empty((*grad.shape[:-1], codes.shape[1]))
    rows = result.numel() // codes.shape[1]
    run_kernel(
        "linear_8bit_backward", grad, codes, scales, rows, *codes.shape, ELEMENTS[grad.dtype], parts_of_float(), result
    )
    return result


def _linear_8bit_mixed(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    operators, rows, shape = torch.ops.bitsandbytes, x.reshape(-1, x.shape[-1]), (*x.shape[:-1], codes.shape[0])
    if not x.numel():
        return x.new_empty(shape)
    rows_in_8bit, row_scales, outliers = operators.int8_vectorwise_quant.default(rows.half(), threshold)
    weight = codes, row_scales, scales
    result: Tensor
    if threshold > 0:
        result, _ = operators.int8_mixed_scaled_mm.default(rows, rows_in_8bit, *weight, outliers, bias)
    else:
        result = operators.int8_scaled_mm.default(rows_in_8bit, *weight, bias=bias, dtype=x.dtype)
    return result.view(shape)


define("linear_8bit(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor", _linear_8bit, ANY_DEVICE)
define("linear_8bit_backward(Tensor grad, Tensor codes, Tensor scales) -> Tensor", _linear_8bit_backward, ANY_DEVICE)

define(
    "linear_8bit_mixed(Tensor x, Tensor codes, Tensor scales, Tensor? bias, float threshold) -> Tensor",
    _linear_8bit_mixed,
    ANY_DEVICE,
)


@fake("linear_8bit")
@fake("linear_8bit_mixed")
def _(x: Tensor, codes: Tensor, *_: object) -> Tensor:
    torch._check(x.shape[-1] == codes.shape[1])  # type: ignore[no-untyped-call]
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@fake("linear_8bit_backward")
def _(grad: Tensor, codes: Tensor, _scales: Tensor) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], codes.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scales, bias, *_ = inputs
    ctx.save_for_backward(codes, scales)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    to_x = to_bias = None
    if ctx.needs_input_grad[0]:
        to_x = own.linear_8bit_backward(grad, *ctx.saved_tensors)
    if ctx.needs_input_grad[3]:
        to_bias = grad.sum(list(range(grad.ndim - 1)), dtype=ctx.bias_dtype)
    return to_x, None, None, to_bias


def _differentiate_mixed(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_differentiate(ctx, grad), None


register_autograd("ort_accel::linear_8bit", _differentiate, setup_context=_save)
register_autograd("ort_accel::linear_8bit_mixed", _differentiate_mixed, setup_context=_save)

linear_8bit = own.linear_8bit.default
"""The layer's output while its model trains."""

linear_8bit_mixed = own.linear_8bit_mixed.default
"""The layer's output in evaluation. Its input is quantized to 8 bits, except for columns that reach the threshold."""

linear_8bit_backward = own.linear_8bit_backward.default
"""The gradient of the layer's input."""


@chosen_for(own.linear_8bit.default)
def _linear_8bit_call(
    node: fx.Node, x: fx.Node, codes: fx.Node, scales: fx.Node, bias: fx.Node | None
) -> KernelCall | None:
    element = element_of(x, bias or x)
    if element is None or not has_kernel(fake_of(x), fake_of(scales)):
        return None
    rows = prod(fake_of(node).shape[:-1])
    shape = fake_of(codes).shape
    return KernelCall("linear_8bit", (x, codes, scales, rows, *shape, element, parts_of_float(), bias, Output(0)))


@chosen_for(own.linear_8bit_backward.default)
def _linear_8bit_backward_call(node: fx.Node, grad: fx.Node, codes: fx.Node, scales: fx.Node) -> KernelCall | None:
    if not has_kernel(fake_of(grad), fake_of(scales)):
        return None
    rows, element = prod(fake_of(node).shape[:-1]), ELEMENTS[fake_of(grad).dtype]
    weight = codes, scales, rows, *fake_of(codes).shape
    return KernelCall("linear_8bit_backward", (grad, *weight, element, parts_of_float(), Output(0)))
