"""The head of TRL's language models, which scores tokens in pieces of the vocabulary, written as plain operators.

TRL never makes all scores at once, and on a CPU it makes those of every token, padding and prompts among them, a
second time for the backward. As operators in the model's graph they are made once, for the tokens that count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ort_accel.capture.autograd_replacements import Written, write_out
from ort_accel.kernels.token_log_probs import token_scores

KERNELS = "trl.kernels.chunked_logprob"
MOST = 1 << 28
"""So many scores (1 GiB) are made at once at most. Beyond that TRL's own function takes less memory."""

Scores = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def write_out_heads() -> None:
    """Capture TRL's head as operators, where TRL is in use."""
    kernels = sys.modules.get(KERNELS)  # its import takes seconds, and whoever trains with it has done it
    function = getattr(kernels, "ChunkedLogProbFunction", None)
    if function is not None:
        write_out(function, Written(_scores, _suits))


def _suits(arguments: Sequence[Any]) -> bool:
    hidden, weight = arguments[:2]
    is_on_cpu = isinstance(hidden, Tensor) and isinstance(weight, Tensor) and hidden.device.type == "cpu"
    return is_on_cpu and bool(hidden.shape[0] * weight.shape[0] <= MOST)


def _scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,  # noqa: ARG001
    softcap: float | None = None,
    scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
) -> Scores:
    """For each row of `hidden` the logarithm of its target's probability, and what else `outputs` asks for."""
    bias = None if bias is None else bias.to(hidden.dtype)
    scores = F.linear(hidden, weight.to(hidden.dtype), bias).float()
    if scale != 1:
        scores = scores * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if temperature != 1:
        scores = scores / temperature
    found, entropy, total = token_scores(scores, targets)
    scores = scores.detach()
    return (
        found,
        entropy if "entropy" in outputs else None,
        (2 * scores).logsumexp(-1) - 2 * total if "log_sum_sq_probs" in outputs else None,
        scores.mean(-1) if "mean_logits" in outputs else None,
        scores.argmax(-1) == targets if "is_top1" in outputs else None,
    )
