"""The product of an activated gate with another tensor as one operator, whose gradients are one operator, too.

The gradients are computed from the gate, so that its activation is not kept for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.library import register_autograd
from torch.nn import functional

from ort_accel.kernels.kernel_call import KernelCall, Output, chosen_for, fake_of, is_float
from ort_accel.kernels.library import ANY_DEVICE, define, fake
from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import ELEMENTS, run_kernel

own, aten = torch.ops.ort_accel, torch.ops.aten

FUNCTIONS = {"gelu": 0, "gelu_tanh": 1, "silu": 2}
"""The native kernels' numbers of the activations."""

APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}
"""PyTorch's names of gelu's variants."""


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if not _runs_natively(gate, up):
        return (_activated(gate, activation) * up).contiguous()
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    run_kernel("gated_activation", FUNCTIONS[activation], gate, up, *_sizes(gate), out)
    return out


def _gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the gate and of the other tensor."""
    if not _runs_natively(gate, up):
        to_gate, to_up = _gradients(grad, gate, up, activation)
        return to_gate.contiguous(), to_up.contiguous()
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
    run_kernel("gated_activation_backward", FUNCTIONS[activation], grad, gate, up, *_sizes(gate), to_gate, to_up)
    return to_gate, to_up


def _gradients(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns both gradients, computed by PyTorch's operators, which have gradients themselves."""
    scaled, to_up = grad * up, grad * _activated(gate, activation)
    if activation == "silu" and torch.is_grad_enabled():  # its gradient has none in PyTorch
        sigmoid = gate.sigmoid()
        return scaled * (sigmoid * (1 + gate * (1 - sigmoid))), to_up
    if activation == "silu":
        return aten.silu_backward(scaled, gate), to_up
    return aten.gelu_backward(scaled, gate, approximate=APPROXIMATIONS[activation]), to_up


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate=APPROXIMATIONS[activation])


def _sizes(gate: Tensor) -> tuple[int, int, int, int, int]:
    """Returns the rows, columns, strides and the type of contiguous operands, as one row."""
    count = gate.numel()
    return 1, count, count, count, ELEMENTS[gate.dtype]


def _runs_natively(gate: Tensor, up: Tensor) -> bool:
    is_single = gate.device.type == "cpu" and gate.dtype == up.dtype == torch.float32
    return is_single and native_library() is not None


define("gated(Tensor gate, Tensor up, str activation) -> Tensor", _gated, ANY_DEVICE)
define(
    "gated_backward(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    _gated_backward,
    ANY_DEVICE,
)


@fake("gated")
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


@fake("gated_backward")
def _(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    gate, up = ctx.saved_tensors
    if torch.is_grad_enabled():  # the gradients are to be differentiated
        return *_gradients(grad, gate, up, ctx.activation), None
    return *own.gated_backward(grad, gate, up, ctx.activation), None


register_autograd("ort_accel::gated", _differentiate, setup_context=_save)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Returns `activation(gate) * up` for an activation of `FUNCTIONS`."""
    result: Tensor = own.gated(gate, up, activation)
    return result


@chosen_for(own.gated.default)
def _gated_call(_: fx.Node, gate: fx.Node, up: fx.Node, activation: str) -> KernelCall | None:
    if not is_float(gate) or not is_float(up):
        return None
    count = fake_of(gate).numel()
    sizes = (1, count, count, count, ELEMENTS[torch.float32])
    return KernelCall("gated_activation", (FUNCTIONS[activation], gate, up, *sizes, Output(0)))


@chosen_for(own.gated_backward.default)
def _gated_backward_call(_: fx.Node, grad: fx.Node, gate: fx.Node, up: fx.Node, activation: str) -> KernelCall | None:
    if not all(map(is_float, (grad, gate, up))):
        return None
    count = fake_of(gate).numel()
    operands, sizes = (grad, gate, up), (1, count, count, count, ELEMENTS[torch.float32])
    return KernelCall("gated_activation_backward", (FUNCTIONS[activation], *operands, *sizes, Output(0), Output(1)))
