"""The gradient of logits under a cross-entropy: `softmax * share`, less the share at each row's label.

PyTorch computes the gradient of the log-probabilities first, a tensor with one number in each row.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.kernels.kernel_call import KernelCall, Output, chosen_for, fake_of
from ort_accel.kernels.library import ANY_DEVICE, define, fake
from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import ELEMENTS, run_kernel

own = torch.ops.ort_accel
aten = torch.ops.aten

NONE, MEAN = 0, 1
"""The numbers by which PyTorch's operators name a reduction."""


def _cross_entropy_backward(
    grad: Tensor,
    log_probs: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Returns the gradient of the logits, from their log-probabilities."""
    if takes(grad, log_probs, target, weight, total_weight):
        log_probs, result = log_probs.contiguous(), torch.empty(log_probs.shape, dtype=log_probs.dtype)
        rows = log_probs, target.contiguous(), weight if weight is None else weight.contiguous()
        sizes = ignore_index, *log_probs.shape, ELEMENTS[log_probs.dtype]
        divisor = total_weight if reduction == MEAN else None
        run_kernel("nll_gradient", grad.contiguous(), int(reduction == NONE), *rows, divisor, *sizes, result)
        return result
    if log_probs.dtype in (torch.float16, torch.bfloat16):  # the second step rounds once, the formula each time
        slope = aten.nll_loss_backward(grad, log_probs, target, weight, reduction, ignore_index, total_weight)
        return aten._log_softmax_backward_data(slope, log_probs, 1, log_probs.dtype)  # type: ignore[no-any-return]
    labels = target.long()
    valid = labels != ignore_index
    places = torch.where(valid, labels, 0)
    slope = grad / total_weight if reduction == MEAN else grad
    share = torch.where(valid, slope if weight is None else slope * weight[places], 0)
    column, share = places.unsqueeze(1), share.unsqueeze(1)
    softmax = log_probs.exp().mul_(share)
    return softmax.scatter_(1, column, softmax.gather(1, column) - share)


def takes(*operands: Tensor | None) -> bool:
    """True if the native kernel runs for these: the labels are of 64 bits, and all else has one type."""
    given = [one for one in operands if one is not None]
    if native_library() is None or any(one.device.type != "cpu" for one in given):
        return False
    types = {one.dtype for one in given}
    return torch.int64 in types and len(types) == 2 and not types.isdisjoint(ELEMENTS)


define(
    "cross_entropy_backward(Tensor grad, Tensor log_probs, Tensor target, Tensor? weight, int reduction,"
    " SymInt ignore_index, Tensor total_weight) -> Tensor",
    _cross_entropy_backward,
    ANY_DEVICE,
)


@fake("cross_entropy_backward")
def _(grad: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


@chosen_for(own.cross_entropy_backward.default)
def _cross_entropy_backward_call(
    _: fx.Node,
    grad: fx.Node,
    log_probs: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignored: Size,
    total_weight: fx.Node,
) -> KernelCall | None:
    operands = (grad, log_probs, target, weight, total_weight)
    if not takes(*(None if one is None else fake_of(one) for one in operands)):
        return None
    total = total_weight if reduction == MEAN else None
    sizes = ignored, *fake_of(log_probs).shape, ELEMENTS[fake_of(log_probs).dtype]
    grad_stride = int(reduction == NONE)
    return KernelCall("nll_gradient", (grad, grad_stride, log_probs, target, weight, total, *sizes, Output(0)))
