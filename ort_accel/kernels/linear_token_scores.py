"""A linear layer with the log-probability of each row's target, as one operator that never holds all scores.

The backward computes the scores again, since each row has a gradient of its own. A head without gradients is an
exception: the gradient of a row of hidden states is then known up to a factor, so the forward computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import register_autograd
from torch.nn import functional

from ort_accel.kernels.library import ANY_DEVICE, define, fake
from ort_accel.kernels.linear_cross_entropy import row_slices, rows_at_once
from ort_accel.kernels.token_log_probs import token_scores, token_scores_backward

own = torch.ops.ort_accel


class ScoreForm(NamedTuple):
    """The steps from products to scores: `soft_cap * tanh(scale * product / soft_cap) / temperature`."""

    scale: float = 1.0
    soft_cap: float = 0.0
    """0 for none."""
    temperature: float = 1.0


class TokenScores(NamedTuple):
    """Numbers of each row; those behind the first two have no gradient."""

    log_probs: Tensor
    entropy: Tensor
    logsumexp: Tensor
    log_sum_sq_probs: Tensor
    mean_logits: Tensor
    is_top1: Tensor
    slopes: Tensor
    """The gradients of hidden states under the log-probabilities, or nothing."""


def workspace(rows: int, width: int, columns: int, dtype: torch.dtype, has_weight_gradient: bool) -> int:
    """Returns the bytes that either operator takes beside its operands and results."""
    scores = 2 * min(rows, rows_at_once(columns, torch.float32)) * columns * torch.float32.itemsize
    is_summed_apart = has_weight_gradient and dtype != torch.float32
    return scores + (columns * width * torch.float32.itemsize if is_summed_apart else 0)


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    return row_slices(hidden.shape[0], rows_at_once(weight.shape[0], torch.float32))


def _scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, form: ScoreForm) -> Tensor:
    scores = functional.linear(hidden, weight, bias).float()
    if form.scale != 1:
        scores *= form.scale
    if form.soft_cap:
        scores.div_(form.soft_cap).tanh_().mul_(form.soft_cap)
    if form.temperature != 1:
        scores /= form.temperature
    return scores


def _of_products(slopes: Tensor, scores: Tensor, form: ScoreForm) -> Tensor:
    """Turns the gradient of scores into that of products, in place."""
    if form.soft_cap:
        slopes.addcmul_(slopes, scores.mul_(form.temperature / form.soft_cap).square_(), value=-1)
    factor = form.scale / form.temperature
    return slopes if factor == 1 else slopes.mul_(factor)


def _linear_token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    form: Sequence[float],
    statistics: Sequence[bool],
    has_slopes: bool,
) -> TokenScores:
    """Returns the numbers of each row, and nothing for those that are not wanted."""
    parts = [
        _of_rows(hidden[rows], weight, bias, targets[rows], ScoreForm(*form), statistics, has_slopes)
        for rows in _chunks(hidden, weight)
    ]
    if not parts:
        return _empty(hidden, statistics, has_slopes)
    return TokenScores(*(torch.cat(found) for found in zip(*parts, strict=True)))


def _of_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    form: ScoreForm,
    statistics: Sequence[bool],
    has_slopes: bool,
) -> TokenScores:
    scores = _scores(hidden, weight, bias, form)
    found, entropy, total = token_scores(scores, targets)
    squares, mean, is_top1 = statistics_of(scores, targets, total, statistics)
    slopes = hidden.new_empty(0)
    if has_slopes:
        ones, zeros = torch.ones_like(found), torch.zeros_like(found)
        of_scores = token_scores_backward(ones, zeros, scores, targets, total, entropy)
        slopes = _of_products(of_scores, scores, form).to(hidden.dtype) @ weight
    return TokenScores(found, entropy, total, squares, mean, is_top1, slopes)


def statistics_of(
    scores: Tensor, targets: Tensor, logsumexp: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the three statistics of each row that have no gradient, and nothing for those that are not wanted."""
    nothing, (has_squares, has_mean, has_top1) = scores.new_empty(0), wanted
    squares = (2 * scores).logsumexp(-1) - 2 * logsumexp if has_squares else nothing
    mean = scores.mean(-1) if has_mean else nothing
    return squares, mean, scores.argmax(-1) == targets if has_top1 else nothing.bool()


def _linear_token_scores_backward(
    grad: Tensor,
    entropy_grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    slopes: Tensor,
    form: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of hidden states, weight and bias, and nothing for those that are not wanted."""
    nothing = hidden.new_empty(0)
    if slopes.numel() and not entropy_grad.any():
        return (slopes * grad.unsqueeze(-1)).to(hidden.dtype), nothing, nothing.clone()
    to_hidden = torch.empty_like(hidden) if wanted[0] else nothing
    to_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else nothing.clone()
    to_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else nothing.clone()
    shape = ScoreForm(*form)
    for rows in _chunks(hidden, weight):
        scores, part = _scores(hidden[rows], weight, bias, shape), hidden[rows]
        given = scores, targets[rows], logsumexp[rows], entropy[rows]
        of_scores = token_scores_backward(grad[rows], entropy_grad[rows], *given)
        of_products = _of_products(of_scores, scores, shape).to(hidden.dtype)
        if wanted[0]:
            torch.mm(of_products, weight, out=to_hidden[rows])
        if wanted[1]:
            _add_product(to_weight, of_products, part)
        if wanted[2]:
            to_bias += of_products.sum(0, dtype=torch.float32)
    return to_hidden, to_weight.to(weight.dtype), to_bias.to(weight.dtype)


def _add_product(onto: Tensor, slopes: Tensor, hidden: Tensor) -> None:
    """Adds a product in single precision, whatever type it is computed in."""
    if hidden.dtype == onto.dtype:
        onto.addmm_(slopes.T, hidden)
    else:
        onto += slopes.T @ hidden


def _empty(hidden: Tensor, statistics: Sequence[bool], has_slopes: bool) -> TokenScores:
    """Returns results of the right sizes without values."""
    rows, dtype = hidden.shape[0], torch.float32
    found, entropy, total = (hidden.new_empty(rows, dtype=dtype) for _ in range(3))
    squares, mean, is_top1 = (
        hidden.new_empty(rows if want else 0, dtype=kind)
        for want, kind in zip(statistics, (dtype, dtype, torch.bool), strict=True)
    )
    slopes = hidden.new_empty(hidden.shape if has_slopes else 0)
    return TokenScores(found, entropy, total, squares, mean, is_top1, slopes)


define(
    "linear_token_scores(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, float[] form,"
    " bool[3] statistics, bool has_slopes) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _linear_token_scores,
    ANY_DEVICE,
)
define(
    "linear_token_scores_backward(Tensor grad, Tensor entropy_grad, Tensor hidden, Tensor weight, Tensor? bias,"
    " Tensor targets, Tensor logsumexp, Tensor entropy, Tensor slopes, float[] form, bool[3] wanted)"
    " -> (Tensor, Tensor, Tensor)",
    _linear_token_scores_backward,
    ANY_DEVICE,
)


@fake("linear_token_scores")
def _(
    hidden: Tensor,
    _weight: Tensor,
    _bias: Tensor | None,
    targets: Tensor,
    _form: Sequence[float],
    statistics: Sequence[bool],
    has_slopes: bool,
) -> TokenScores:
    torch._check(hidden.shape[0] == targets.shape[0])  # type: ignore[no-untyped-call]
    return _empty(hidden, statistics, has_slopes)


@fake("linear_token_scores_backward")
def _(
    _grad: Tensor, _entropy_grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *more: Any
) -> tuple[Tensor, ...]:
    wanted = more[-1]
    operands = (hidden, weight, bias)
    return tuple(
        hidden.new_empty(one.shape if want and one is not None else 0)
        for one, want in zip(operands, wanted, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: TokenScores) -> None:
    hidden, weight, bias, targets, ctx.form, *_ = inputs
    _, entropy, logsumexp, *others = output
    ctx.mark_non_differentiable(logsumexp, *others)
    ctx.save_for_backward(hidden, weight, bias, targets, logsumexp, entropy, others[-1])


def _differentiate(ctx: Any, grad: Tensor, entropy_grad: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    found = own.linear_token_scores_backward(grad, entropy_grad, *ctx.saved_tensors, ctx.form, wanted)
    return *(one if want else None for one, want in zip(found, wanted, strict=True)), None, None, None, None


register_autograd("ort_accel::linear_token_scores", _differentiate, setup_context=_save)


def linear_token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    form: ScoreForm,
    statistics: Sequence[bool] = (False, False, False),
) -> TokenScores:
    """Returns the numbers of each row: log-probabilities and entropies, and the wanted ones of three statistics."""
    has_head_gradient = weight.requires_grad or (bias is not None and bias.requires_grad)
    has_slopes = torch.is_grad_enabled() and hidden.requires_grad and not has_head_gradient
    return TokenScores(
        *own.linear_token_scores(hidden, weight, bias, targets, list(form), list(statistics), has_slopes)
    )
