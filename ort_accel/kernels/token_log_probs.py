"""The log-probability of each token's target and the entropy beside it, as one operator.

The separate operators and their gradients make a dozen tensors as large as the scores. Here the forward makes none, and
the backward makes one, the gradient. The backward skips the entropy where nothing reads its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd

from ort_accel.kernels.library import ANY_DEVICE, define, fake

BLOCK_NUMBERS = 1 << 19
"""Numbers that are worked on at a time: they stay in the cache."""


def _blocks(scores: Tensor) -> Iterator[slice]:
    rows = max(BLOCK_NUMBERS // max(scores.shape[1], 1), 1)
    return (slice(start, start + rows) for start in range(0, scores.shape[0], rows))


def _token_scores(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_probs, entropy, logsumexp = (scores.new_empty(scores.shape[0]) for _ in range(3))
    for rows in _blocks(scores):
        part = scores[rows]
        largest = part.amax(-1, keepdim=True)
        powers = (part - largest).exp_()
        sums = powers.sum(-1)
        logsumexp[rows] = sums.log() + largest.squeeze(-1)
        entropy[rows] = logsumexp[rows] - torch.linalg.vecdot(powers, part) / sums
        log_probs[rows] = part.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1) - logsumexp[rows]
    return log_probs, entropy, logsumexp


def _token_scores_backward(
    grad: Tensor, entropy_grad: Tensor, scores: Tensor, targets: Tensor, logsumexp: Tensor, entropy: Tensor
) -> Tensor:
    gradient = torch.empty_like(scores)
    has_entropy_grad = bool(entropy_grad.any())
    for rows in _blocks(scores):
        logarithms = scores[rows] - logsumexp[rows].unsqueeze(-1)
        part, share = torch.exp(logarithms, out=gradient[rows]), grad[rows].unsqueeze(-1)
        if has_entropy_grad:
            logarithms.add_(entropy[rows].unsqueeze(-1)).mul_(entropy_grad[rows].unsqueeze(-1)).add_(share)
            part.mul_(logarithms.neg_())
        else:
            part.mul_(-share)
        part.scatter_add_(-1, targets[rows].unsqueeze(-1), share)
    return gradient


define("token_scores(Tensor scores, Tensor targets) -> (Tensor, Tensor, Tensor)", _token_scores, ANY_DEVICE)
define(
    "token_scores_backward(Tensor found, Tensor entropy_grad, Tensor scores, Tensor targets, Tensor total, "
    "Tensor entropy) -> Tensor",
    _token_scores_backward,
    ANY_DEVICE,
)


@fake("token_scores")
def _(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    torch._check(scores.shape[0] == targets.shape[0])  # type: ignore[no-untyped-call]
    log_probs, entropy, logsumexp = (scores.new_empty(scores.shape[0]) for _ in range(3))
    return log_probs, entropy, logsumexp


@fake("token_scores_backward")
def _(_grad: Tensor, _entropy_grad: Tensor, scores: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(scores)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, entropy, logsumexp = output
    ctx.mark_non_differentiable(logsumexp)
    ctx.save_for_backward(*inputs, logsumexp, entropy)


def _differentiate(ctx: Any, grad: Tensor, entropy_grad: Tensor, _: object) -> tuple[Tensor, None]:
    return token_scores_backward(grad, entropy_grad, *ctx.saved_tensors), None


register_autograd("ort_accel::token_scores", _differentiate, setup_context=_save)

token_scores = torch.ops.ort_accel.token_scores.default
"""For rows of scores and a target each: the target's log-probability, the entropy, and the log-sum-exp of the scores,
which has no gradient."""

token_scores_backward = torch.ops.ort_accel.token_scores_backward.default
"""The gradient of the scores, from those of the log-probability and the entropy."""
