"""Plain operators in place of TRL's head of language models, which computes log probabilities in chunks.

On a CPU, TRL computes the logits of every token, padding and prompts included. As operators of the model's graph they
are computed for tokens with a label only. Few logits are kept for the backward; many never exist at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ort_accel.capture.autograd_replacements import Replacement, capture_as_operators
from ort_accel.kernels.linear_token_scores import ScoreForm, linear_token_scores, statistics_of
from ort_accel.kernels.token_log_probs import token_scores

TRL_MODULE = "trl.kernels.chunked_logprob"
MOST_KEPT_LOGITS = 1 << 24
"""The number of logits up to which they are kept for the backward. More are computed again, some rows at a time."""
STATISTICS = ("log_sum_sq_probs", "mean_logits", "is_top1")
"""Names of numbers without gradients, in the operator's order."""

LogProbs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def write_out_heads() -> None:
    """Capture TRL's head as plain operators, if TRL is imported."""
    kernels = sys.modules.get(TRL_MODULE)  # a script that trains with it has imported it, which is slow
    function = getattr(kernels, "ChunkedLogProbFunction", None)
    if function is not None:
        capture_as_operators(function, Replacement(_log_probs, _is_suitable))


def _is_suitable(arguments: Sequence[Any]) -> bool:
    hidden, weight = arguments[:2]
    return isinstance(hidden, Tensor) and isinstance(weight, Tensor) and hidden.device.type == "cpu"


def _log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,  # noqa: ARG001
    softcap: float | None = None,
    scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
) -> LogProbs:
    """Returns the log probability of each row's target, and the statistics that `outputs` names."""
    bias, weight = None if bias is None else bias.to(hidden.dtype), weight.to(hidden.dtype)
    wanted = [name in outputs for name in STATISTICS]
    if hidden.shape[0] * weight.shape[0] > MOST_KEPT_LOGITS:
        form = ScoreForm(scale, softcap or 0.0, temperature)
        found, entropy, _, *statistics, _ = linear_token_scores(hidden, weight, bias, targets, form, wanted)
    else:
        logits = _logits(hidden, weight, bias, temperature, softcap, scale)
        found, entropy, total = token_scores(logits, targets)
        statistics = list(statistics_of(logits.detach(), targets, total, wanted))
    squares, mean, is_top1 = (one if want else None for one, want in zip(statistics, wanted, strict=True))
    return found, entropy if "entropy" in outputs else None, squares, mean, is_top1


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None, scale: float
) -> Tensor:
    logits = F.linear(hidden, weight, bias).float()
    if scale != 1:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1:
        logits = logits / temperature
    return logits
