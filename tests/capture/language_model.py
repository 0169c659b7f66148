"""A small masked language model, and batches for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY = 8, 40


def hidden(mask: Tensor) -> Tensor:
    """The keys that padding hides."""
    return mask[:, None, None, :].bool()


class Output(NamedTuple):
    """What models give: a loss, and scores for every token."""

    loss: Tensor | None
    logits: Tensor


class Model(nn.Module):
    """A masked language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=hidden(mask))
        return self.out(found.transpose(1, 2).flatten(2))

    def body(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.drop(self.norm(self.embed(ids)))
        x = x + self.attend(x, mask)
        return x + self.drop(self.narrow(F.gelu(self.wide(x))))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(self.body(ids, mask))
        if labels is None:
            return Output(None, logits)
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Nested(Model):
    """Computes parts of its body again in the backward, one of them within another."""

    def body(self, ids: Tensor, mask: Tensor) -> Tensor:
        inner = super().body

        def outer(ids: Tensor, mask: Tensor) -> Tensor:
            return self.drop(checkpoint(inner, ids, mask, use_reentrant=False))

        return checkpoint(outer, ids, mask, use_reentrant=False)


def batch(rows: int, length: int, real: float = 0.6, labelled: float = 0.4, seed: int = 0) -> dict[str, Tensor]:
    """Rows of which about this share is real, and of that this share is labelled."""
    torch.manual_seed(seed)
    kept = (torch.rand(rows, 1) * 0.4 + real - 0.2).clamp(2 / length, 1) * length if real < 1 else length
    mask = (torch.arange(length) < kept).expand(rows, length)
    counts = mask & (torch.rand(rows, length) < labelled)
    counts[0, 0] = True
    labels = torch.randint(0, VOCABULARY, (rows, length)).where(counts, -100)
    return {"ids": torch.randint(1, VOCABULARY, (rows, length)) * mask, "mask": mask.long(), "labels": labels}


def engine(**sections: Any) -> dict[str, Any]:
    """Quick settings for a few steps; what is said goes to the report alone."""
    return {"engine": {"dynamic_shapes": True}, "observe": {"log_level": "error"}} | sections
