"""The scores of words for tokens, as one operator: what each token's target gets, and the entropy beside it.

As single operators these and their gradients make a dozen tensors as large as the scores. Here the forward makes none,
and the backward one: the gradient. Parts of it that nobody asked for, such as that of an entropy which is only logged,
take no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

LIBRARY: Any = Library("ort_accel", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("token_scores(Tensor scores, Tensor targets) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    "token_scores_backward(Tensor found, Tensor entropy_grad, Tensor scores, Tensor targets, Tensor total, "
    "Tensor entropy) -> Tensor"
)

AT_ONCE = 1 << 19
"""So many numbers are worked on at a time: they stay in the cache."""


def _blocks(scores: Tensor) -> Iterator[slice]:
    rows = max(AT_ONCE // max(scores.shape[1], 1), 1)
    return (slice(at, at + rows) for at in range(0, scores.shape[0], rows))


def _token_scores(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found, entropy, total = (scores.new_empty(scores.shape[0]) for _ in range(3))
    for rows in _blocks(scores):
        part = scores[rows]
        most = part.amax(-1, keepdim=True)
        powers = (part - most).exp_()
        sums = powers.sum(-1)
        total[rows] = sums.log() + most.squeeze(-1)
        entropy[rows] = total[rows] - torch.linalg.vecdot(powers, part) / sums
        found[rows] = part.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1) - total[rows]
    return found, entropy, total


def _token_scores_backward(
    found: Tensor, entropy_grad: Tensor, scores: Tensor, targets: Tensor, total: Tensor, entropy: Tensor
) -> Tensor:
    gradient = torch.empty_like(scores)
    asks_for_entropy = bool(entropy_grad.any())
    for rows in _blocks(scores):
        logarithms = scores[rows] - total[rows].unsqueeze(-1)
        part, share = torch.exp(logarithms, out=gradient[rows]), found[rows].unsqueeze(-1)
        if asks_for_entropy:
            logarithms.add_(entropy[rows].unsqueeze(-1)).mul_(entropy_grad[rows].unsqueeze(-1)).add_(share)
            part.mul_(logarithms.neg_())
        else:
            part.mul_(-share)
        part.scatter_add_(-1, targets[rows].unsqueeze(-1), share)
    return gradient


for _name, _kernel in {"token_scores": _token_scores, "token_scores_backward": _token_scores_backward}.items():
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


@register_fake("ort_accel::token_scores")  # type: ignore[untyped-decorator]
def _(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    torch._check(scores.shape[0] == targets.shape[0])  # type: ignore[no-untyped-call]
    found, entropy, total = (scores.new_empty(scores.shape[0]) for _ in range(3))
    return found, entropy, total


@register_fake("ort_accel::token_scores_backward")  # type: ignore[untyped-decorator]
def _(_found: Tensor, _entropy_grad: Tensor, scores: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(scores)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, entropy, total = output
    ctx.mark_non_differentiable(total)
    ctx.save_for_backward(*inputs, total, entropy)


def _differentiate(ctx: Any, found: Tensor, entropy: Tensor, _total: Any) -> tuple[Tensor, None]:
    return token_scores_backward(found, entropy, *ctx.saved_tensors), None


register_autograd("ort_accel::token_scores", _differentiate, setup_context=_keep)

token_scores = torch.ops.ort_accel.token_scores.default
"""For rows of scores and a target for each: the logarithm of the target's probability, the entropy, and the logarithm
of the sum of all powers, which has no gradient."""

token_scores_backward = torch.ops.ort_accel.token_scores_backward.default
"""The gradient of the scores, from those of the first two results."""
