"""An RMS norm as one operator, with its gradient: `x / sqrt(mean(x * x) + eps) * weight` over the last dimension.

Models write it as six operators, whose gradients are fifteen more. The operator keeps one number of each row for the
backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.library import register_autograd

from ort_accel.kernels.kernel_call import KernelCall, Output, chosen_for, fake_of, is_float, rows_and_columns
from ort_accel.kernels.library import ANY_DEVICE, define, fake
from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import ELEMENTS, run_kernel

own = torch.ops.ort_accel


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    if not _runs_natively(x, weight):
        rstd = _inverse_root(x, eps)
        normal = x * rstd
        return normal if weight is None else normal * weight, rstd
    x, columns = x.contiguous(), x.shape[-1]
    out, rstd = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    element = ELEMENTS[x.dtype]
    run_kernel("rms_norm", x, None, weight, rstd.numel(), columns, float(eps), element, element, None, out, rstd)
    return out, rstd


def _inverse_root(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x, and that of the weight; nothing in place of one that is not wanted."""
    if not _runs_natively(x, weight):
        return _gradients(grad, x, weight, rstd, wanted)
    columns = x.shape[-1]
    to_weight = grad.new_empty(columns if wanted else 0)
    grad, x, element = grad.contiguous(), x.contiguous(), ELEMENTS[x.dtype]
    to_x = torch.empty_like(x)
    sizes = rstd.numel(), columns, element, element
    run_kernel("rms_norm_backward", grad, x, weight, rstd, None, *sizes, to_x, to_weight if wanted else None)
    return to_x, to_weight


def _gradients(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    """Returns both gradients, computed by PyTorch's operators, which have gradients themselves."""
    normal = x * rstd
    scaled = grad if weight is None else grad * weight
    to_x = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd
    return to_x, (grad * normal).sum(list(range(x.ndim - 1))) if wanted else grad.new_empty(0)


def _runs_natively(x: Tensor, weight: Tensor | None) -> bool:
    is_single = x.device.type == "cpu" and x.dtype == torch.float32
    return is_single and (weight is None or weight.is_contiguous()) and native_library() is not None


define("rms_norm(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)", _rms_norm, ANY_DEVICE)
define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, bool wanted) -> (Tensor, Tensor)",
    _rms_norm_backward,
    ANY_DEVICE,
)


@fake("rms_norm")
def _(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1))


@fake("rms_norm_backward")
def _(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1] if wanted else 0)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _differentiate(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor, Tensor | None, None]:
    x, weight, rstd = ctx.saved_tensors
    wanted = ctx.needs_input_grad[1]
    if torch.is_grad_enabled():  # the gradient is to be differentiated
        to_x, to_weight = _gradients(grad, x, weight, _inverse_root(x, ctx.eps), wanted)
    else:
        to_x, to_weight = own.rms_norm_backward(grad, x, weight, rstd, wanted)
    return to_x, to_weight if wanted else None, None


register_autograd("ort_accel::rms_norm", _differentiate, setup_context=_save)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns the norm."""
    result: Tensor = own.rms_norm(x, weight, eps)[0]
    return result


@chosen_for(own.rms_norm.default)
def _rms_norm_call(_: fx.Node, x: fx.Node, weight: fx.Node | None, eps: float) -> KernelCall | None:
    if not all(map(is_float, (x, weight or x))):
        return None
    element, (rows, columns) = ELEMENTS[torch.float32], rows_and_columns(x, fake_of(x).shape[-1:])
    outputs = (Output(0), Output(1))
    return KernelCall("rms_norm", (x, None, weight, rows, columns, float(eps), element, element, None, *outputs))


@chosen_for(own.rms_norm_backward.default)
def _rms_norm_backward_call(
    _: fx.Node, grad: fx.Node, x: fx.Node, weight: fx.Node | None, rstd: fx.Node, wanted: bool
) -> KernelCall | None:
    if not all(map(is_float, (grad, x, weight or x))):
        return None
    element, (rows, columns) = ELEMENTS[torch.float32], rows_and_columns(x, fake_of(x).shape[-1:])
    operands, outputs = (grad, x, weight, rstd, None), (Output(0), Output(1) if wanted else None)
    return KernelCall("rms_norm_backward", (*operands, rows, columns, element, element, *outputs))
