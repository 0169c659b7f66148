"""Finds the sequences that rows of tokens are packed from, by the pairs of tokens that attention allows."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_sequences(allowed: Tensor, queries: Tensor, keys: Tensor) -> Tensor | None:
    """Returns the number of each token's sequence, counted through the batch; None where every row is one sequence.

    `allowed` are the pairs that may attend, [batch or 1, queries, keys]; `queries` and `keys` flag the tokens of
    [batch, length] that are read. No pair that is read crosses from one sequence to another.
    """
    if queries.shape != keys.shape or allowed.shape[1:] != (queries.shape[1], keys.shape[1]):
        return None
    starts = _possible_starts(allowed, queries | keys)
    if not starts.any():
        return None
    starts[:, 0] = True
    numbers = starts.flatten().cumsum(0).view(starts.shape) - 1
    apart = numbers[:, :, None] != numbers[:, None, :]
    crossing = apart.logical_and_(allowed).logical_and_(queries[:, :, None]).logical_and_(keys[:, None, :])
    return None if crossing.any() else numbers


def _possible_starts(allowed: Tensor, read: Tensor) -> Tensor:
    """Flags the tokens that neither attend to the token read before them, nor are attended to by it."""
    sample, position = read.nonzero(as_tuple=True)
    before, after = position[:-1], position[1:]
    row = sample[1:] if allowed.shape[0] > 1 else torch.zeros_like(after)
    attend = allowed[row, after, before] | allowed[row, before, after]
    starts = torch.zeros_like(read)
    starts[sample[1:], after] = (sample[1:] == sample[:-1]) & ~attend
    return starts
