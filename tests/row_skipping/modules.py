"""Small modules with one attention, for tests of the row analysis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, VOCABULARY = 8, 11

ReadOut = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Self-attention under a mask, and a function that reads its result."""

    def __init__(self, read: ReadOut, mask: Callable[[Tensor], Tensor | None], **how: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(8, 8)
        self._read, self._mask, self._how = read, mask, how

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self._read(self.attend(self.embed(ids), mask))

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        """Applies the layer alone."""
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(mask), **self._how)
        return x + self.out(found.transpose(1, 2).flatten(2))


def first_tokens(x: Tensor) -> Tensor:
    """Returns the tokens that a classifier reads."""
    return x[:, 0]


def low() -> float:
    """Returns the number that masks a score; a global number would become a symbolic one in the graph."""
    return torch.finfo(torch.float32).min


def keys_of(mask: Tensor) -> Tensor:
    """Returns a mask that hides padded keys from all queries."""
    return mask[:, None, None, :].bool()


def padded(*kept: int, length: int = 9, left: bool = False) -> tuple[Tensor, Tensor]:
    """Returns ids and mask of sequences with so many real tokens."""
    torch.manual_seed(sum(kept))
    place, counts = torch.arange(length), torch.tensor(kept)[:, None]
    mask = place >= length - counts if left else place < counts
    return torch.randint(0, VOCABULARY, mask.shape), mask.long()
