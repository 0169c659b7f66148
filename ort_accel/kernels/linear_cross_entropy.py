"""A linear layer with the cross-entropy of its scores, as one operator that never holds the scores of all rows.

It computes some rows' scores at a time. The loss is one number, so its gradients are known up to a factor while the
scores are there: the forward computes them, and the backward multiplies them with that factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.library import register_autograd
from torch.nn import functional

from ort_accel.graph.symbolic_sizes import Size
from ort_accel.kernels.kernel_call import KernelCall, Output, chosen_for, fake_of
from ort_accel.kernels.library import ANY_DEVICE, define, fake
from ort_accel.native.library import native_library
from ort_accel.native.run_kernel import ELEMENTS, run_kernel

own = torch.ops.ort_accel

MEAN, SUM = 1, 2
"""The numbers by which PyTorch's operators name a reduction."""

BYTES_AT_ONCE = 1 << 27
"""The scores that exist at a time."""

TYPES = (torch.float32, torch.bfloat16)


class ScoreOptions(NamedTuple):
    """The steps from the products of hidden states and weight to a loss."""

    smoothing: float = 0.0
    """The share of the target that all columns get in equal parts."""
    z_loss: float = 0.0
    """The factor of the squared logarithm of the sum, which is added to the loss."""
    soft_cap: float = 0.0
    """The bound of scores, which are `soft_cap * tanh(score / soft_cap)`; 0 for none."""
    scale: float = 1.0
    """The factor of products before they are capped."""


def rows_at_once(columns: int, dtype: torch.dtype) -> int:
    """Returns the number of rows whose scores exist at a time."""
    return max(BYTES_AT_ONCE // (columns * dtype.itemsize), 1)


def workspace(rows: int, width: int, columns: int, dtype: torch.dtype, has_weight_gradient: bool) -> int:
    """Returns the bytes that the operator takes beside its operands and results."""
    scores = min(rows, rows_at_once(columns, dtype)) * columns * dtype.itemsize
    of_weight = columns * width * torch.float32.itemsize if dtype != torch.float32 and has_weight_gradient else 0
    return scores + of_weight


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    options: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the loss and its gradients by hidden states, weight and bias; nothing for those that are not wanted."""
    hidden, weight, target = hidden.contiguous(), weight.contiguous(), target.contiguous()
    bias = None if bias is None else bias.contiguous()
    operands = hidden, weight, bias
    grads = [
        one.new_empty(one.shape) if want and one is not None else None
        for one, want in zip(operands, wanted, strict=True)
    ]
    if takes(hidden, weight, bias, target):
        loss = hidden.new_empty((), dtype=torch.float32)
        numbers = _numbers(hidden, weight, reduction, ignore_index, options)
        run_kernel("linear_cross_entropy", *operands, target, *numbers, loss, *grads)
        if bool(loss.isnan()):
            _check_targets(target, weight.shape[0], ignore_index)
    else:
        loss = _by_pytorch(hidden, weight, bias, target, reduction, ignore_index, ScoreOptions(*options), grads)
    to_hidden, to_weight, to_bias = (hidden.new_empty(0) if grad is None else grad for grad in grads)
    return loss, to_hidden, to_weight, to_bias


def _numbers(
    hidden: Tensor, weight: Tensor, reduction: int, ignore_index: Size, options: Sequence[float]
) -> tuple[Any, ...]:
    """Returns the arguments of the native kernel that are no tensors, as numbers or sizes of a graph."""
    dtype, columns = hidden.dtype, weight.shape[0]
    sizes = *hidden.shape, columns, ELEMENTS[dtype], ignore_index, int(reduction == MEAN)
    return *sizes, *map(float, options), rows_at_once(columns, dtype)


def takes(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> bool:
    """True if the native kernel runs for these: on the CPU, in one type, with labels of 64 bits."""
    operands = (hidden, weight) if bias is None else (hidden, weight, bias)
    has_types = {one.dtype for one in operands} == {hidden.dtype} and hidden.dtype in TYPES
    is_on_cpu = all(one.device.type == "cpu" for one in (*operands, target))
    return has_types and is_on_cpu and target.dtype == torch.int64 and native_library() is not None


def _check_targets(target: Tensor, columns: int, ignore_index: int) -> None:
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= columns))]
    if wrong.numel():
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


def _by_pytorch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    options: ScoreOptions,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """Returns the loss, and writes the gradients."""
    to_hidden, to_weight, to_bias = grads
    of_weight, of_bias = (None if one is None else torch.zeros_like(one, dtype=torch.float32) for one in grads[1:])
    valid = target != ignore_index
    _check_targets(target, weight.shape[0], ignore_index)
    divisor = valid.sum() if reduction == MEAN else torch.ones(())
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows in row_slices(hidden.shape[0], rows_at_once(weight.shape[0], hidden.dtype)):
        scores = functional.linear(hidden[rows], weight, bias).float()
        losses, slopes = _losses_and_slopes(scores, target[rows], valid[rows], options)
        total += losses.sum()
        slopes = (slopes / divisor.clamp(min=1)).to(hidden.dtype)  # without labels the gradients are zeros
        if to_hidden is not None:
            to_hidden[rows] = slopes @ weight
        if of_weight is not None:
            of_weight += slopes.T @ hidden[rows]
        if of_bias is not None:
            of_bias += slopes.sum(0, dtype=torch.float32)
    for result, found in ((to_weight, of_weight), (to_bias, of_bias)):
        if result is not None and found is not None:
            result.copy_(found)
    return total / divisor


def row_slices(rows: int, at_once: int) -> Iterator[slice]:
    """Yields slices of all rows, with at most so many rows in each."""
    return (slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once))


def _losses_and_slopes(products: Tensor, target: Tensor, valid: Tensor, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """Returns each row's loss, and the gradients of the products under their sum."""
    smoothing, z_loss, soft_cap, scale = options
    scores = products * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    logsumexp = scores.logsumexp(-1, keepdim=True)
    log_probs, places = scores - logsumexp, torch.where(valid, target, 0).unsqueeze(1)
    losses = -(1 - smoothing) * log_probs.gather(1, places) - smoothing * log_probs.mean(-1, keepdim=True)
    losses = losses + z_loss * logsumexp.square()
    slopes = log_probs.exp() * (1 + 2 * z_loss * logsumexp) - smoothing / scores.shape[1]
    slopes.scatter_add_(1, places, torch.full_like(losses, smoothing - 1))
    if soft_cap:
        slopes = slopes * (1 - (scores / soft_cap).square())
    counted = valid.unsqueeze(1)
    return torch.where(counted, losses, 0), torch.where(counted, slopes * scale, 0)


define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int reduction,"
    " SymInt ignore_index, float[] options, bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    _linear_cross_entropy,
    ANY_DEVICE,
)


@fake("linear_cross_entropy")
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    _reduction: int,
    _ignore_index: Size,
    _options: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch._check(hidden.shape[0] == target.shape[0])  # type: ignore[no-untyped-call]
    operands = (hidden, weight, bias)
    to_hidden, to_weight, to_bias = (
        hidden.new_empty(0 if one is None or not want else one.shape)
        for one, want in zip(operands, wanted, strict=True)
    )
    return hidden.new_empty((), dtype=torch.float32), to_hidden, to_weight, to_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    _, *grads = output
    ctx.mark_non_differentiable(*grads)
    ctx.set_materialize_grads(False)
    ctx.wanted = inputs[-1]
    ctx.save_for_backward(*grads)


def _differentiate(ctx: Any, grad: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    found = (
        one * grad if want and grad is not None else None
        for one, want in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return *found, None, None, None, None, None


register_autograd("ort_accel::linear_cross_entropy", _differentiate, setup_context=_save)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    options: Sequence[float],
) -> Tensor:
    """Returns the loss of rows of hidden states. As in a linear layer, autocast decides the type of the products."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    wanted = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in (hidden, weight, bias)]
    loss: Tensor = own.linear_cross_entropy(hidden, weight, bias, target, reduction, ignore_index, options, wanted)[0]
    return loss


@chosen_for(own.linear_cross_entropy.default)
def _linear_cross_entropy_call(
    _: fx.Node,
    hidden: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    target: fx.Node,
    reduction: int,
    ignored: Size,
    options: Sequence[float],
    wanted: Sequence[bool],
) -> KernelCall | None:
    of_bias = None if bias is None else fake_of(bias)
    if not takes(fake_of(hidden), fake_of(weight), of_bias, fake_of(target)):
        return None
    numbers = _numbers(fake_of(hidden), fake_of(weight), reduction, ignored, options)
    outputs = [Output(0), *(Output(1 + at) if want else None for at, want in enumerate(wanted))]
    return KernelCall("linear_cross_entropy", (hidden, weight, bias, target, *numbers, *outputs))
