"""The rotary embedding of queries or keys as one operator, with its gradient: `x * cosines + rotate_half(x) * sines`.

`rotate_half` swaps the halves of the last dimension and negates the half that comes first. Models write the embedding
as seven operators. The tables have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.library import register_autograd

from ort_accel.graph.memory_layout import permuted_order
from ort_accel.graph.symbolic_sizes import Size, expression, same_shape
from ort_accel.kernels.kernel_call import KernelCall, Output, Stride, chosen_for, fake_of
from ort_accel.kernels.library import ANY_DEVICE, define, fake
from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import run_kernel

own = torch.ops.ort_accel

_OUTER_DIMS = 3
"""Dimensions before the last that the native kernel takes."""


class OuterDim(NamedTuple):
    """A dimension before the last."""

    dim: int | None
    """None if the tensor has fewer dimensions than the kernel takes."""
    size: Size
    table_stride: Size
    """The distance of its entries in the tables; 0 where the tables repeat."""


def outer_dims(result: Tensor, cosines: Tensor, sines: Tensor) -> list[OuterDim] | None:
    """Returns the dimensions before the last in the order of memory; None where the native kernel cannot compute.

    The result has no gaps, and the kernel reads contiguous tables.
    """
    tensors = (result, cosines, sines)
    if any(tensor.device.type != "cpu" or tensor.dtype != torch.float32 for tensor in tensors):
        return None
    order = permuted_order(result) or tuple(range(result.ndim))
    if result.ndim > _OUTER_DIMS + 1 or order[-1] != result.ndim - 1 or not same_shape(cosines.shape, sines.shape):
        return None
    if not same_shape(cosines.shape[-1:], result.shape[-1:]):
        return None
    lacking = [OuterDim(None, 1, 0)] * (_OUTER_DIMS + 1 - result.ndim)
    steps = _table_strides(cosines.shape, result.ndim)
    return lacking + [OuterDim(dim, result.shape[dim], steps[dim]) for dim in order[:-1]]


def _table_strides(table: Sequence[Size], ndim: int) -> list[Size]:
    """Returns the strides of a contiguous table along the dimensions of a result."""
    steps: list[Size] = []
    step: Size = 1
    for size in reversed(table):
        steps.append(0 if expression(size) == 1 else step)
        step = step * size
    return [*([0] * (ndim - len(table))), *reversed(steps)]


def _rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return _rotate(x, cosines, sines, is_backward=False)


def _rotary_backward(grad: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns the gradient of x."""
    return _rotate(grad, cosines, sines, is_backward=True)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor, is_backward: bool) -> Tensor:
    out = torch.empty_like(x)
    dims = outer_dims(out, cosines, sines) if native_library() is not None else None
    if dims is None:
        turned = _turn_back(x * sines) if is_backward else _turn(x) * sines
        return torch.add(x * cosines, turned, out=out)
    x, cosines, sines = x if x.stride(-1) == 1 else x.contiguous(), cosines.contiguous(), sines.contiguous()
    sizes, in_tables = [int(size) for _, size, _ in dims], [int(stride) for *_, stride in dims]
    strides = [0 if dim is None else x.stride(dim) for dim, *_ in dims]
    run_kernel("rotary", x, cosines, sines, *sizes, x.shape[-1], *strides, *in_tables, int(is_backward), out)
    return out


def _turn(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


def _turn_back(grad: Tensor) -> Tensor:
    low, high = grad.chunk(2, -1)
    return torch.cat((high, -low), -1)


define("rotary(Tensor x, Tensor cosines, Tensor sines) -> Tensor", _rotary, ANY_DEVICE)
define("rotary_backward(Tensor grad, Tensor cosines, Tensor sines) -> Tensor", _rotary_backward, ANY_DEVICE)


@fake("rotary")
@fake("rotary_backward")
def _(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return own.rotary_backward(grad, *ctx.saved_tensors), None, None


def _differentiate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return own.rotary(grad, *ctx.saved_tensors), None, None


register_autograd("ort_accel::rotary", _differentiate, setup_context=_save)
register_autograd("ort_accel::rotary_backward", _differentiate_backward, setup_context=_save)


def rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns the embedding."""
    result: Tensor = own.rotary(x, cosines, sines)
    return result


@chosen_for(own.rotary.default, in_any_order=True)
def _rotary_call(node: fx.Node, x: fx.Node, cosines: fx.Node, sines: fx.Node) -> KernelCall | None:
    return _rotation_call(node, x, cosines, sines, is_backward=0)


@chosen_for(own.rotary_backward.default, in_any_order=True)
def _rotary_backward_call(node: fx.Node, grad: fx.Node, cosines: fx.Node, sines: fx.Node) -> KernelCall | None:
    return _rotation_call(node, grad, cosines, sines, is_backward=1)


def _rotation_call(node: fx.Node, x: fx.Node, cosines: fx.Node, sines: fx.Node, is_backward: int) -> KernelCall | None:
    dims = outer_dims(fake_of(node), fake_of(cosines), fake_of(sines))
    if dims is None:
        return None
    sizes, strides = [size for _, size, _ in dims], [0 if dim is None else Stride(x, dim) for dim, *_ in dims]
    in_tables = [stride for *_, stride in dims]
    operands = (x, cosines, sines, *sizes, fake_of(x).shape[-1])
    return KernelCall("rotary", (*operands, *strides, *in_tables, is_backward, Output(0)))
