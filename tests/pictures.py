"""What models of pictures and text do: parts of pictures take the places of marked tokens, once both are counted."""

from __future__ import annotations

import torch
from torch import Tensor

IMAGE = 3
"""The token that marks a part of a picture."""


def tokens(rows: int, length: int, marked: int = 2) -> Tensor:
    """Rows of tokens; so many at the beginning of each are marked."""
    ids = torch.randint(IMAGE + 1, 20, (rows, length))
    ids[:, :marked] = IMAGE
    return ids


def placed(hidden: Tensor, ids: Tensor, parts: Tensor) -> Tensor:
    """The rows with parts in the marked places. The text of the error is made before it is known to be needed."""
    mask = ids == IMAGE
    text = f"{mask.sum()} tokens for {parts.shape[0]} parts"
    check(mask.sum() * hidden.shape[-1] == parts.numel(), text)
    return hidden.masked_scatter(mask.unsqueeze(-1).expand_as(hidden), parts)


def check(condition: Tensor, text: str) -> None:
    """An error unless it holds."""
    if torch.compiler.is_compiling():
        torch._check_tensor_all(condition)  # type: ignore[no-untyped-call]
    elif not condition.item():
        raise ValueError(text)
