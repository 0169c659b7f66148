"""Divides the pairs of tokens that attention allows into parts, one for each sequence of a row that holds several."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Part(NamedTuple):
    """Some rows of a batch and some of their tokens, which attend to each other alone."""

    rows: slice
    tokens: slice
    allowed: Tensor
    """The pairs that may attend: [rows, queries, keys], where rows and queries may be 1."""


def parts_of(allowed: Tensor, rows: int) -> list[Part]:
    """Returns the parts of a batch in the order of its tokens: the batch as it is, or each sequence of each row.

    `allowed` are the pairs of the whole batch, [rows or 1, queries or 1, keys].
    """
    whole = [Part(slice(None), slice(None), allowed)]
    if allowed.shape[1] != allowed.shape[2]:
        return whole
    meet = allowed.diagonal(1, 1, 2) | allowed.diagonal(-1, 1, 2)
    if meet.all():
        return whole
    edges = [_edges(row, pairs) for row, pairs in zip(meet, allowed, strict=True)]
    if all(len(of_row) == 2 for of_row in edges):
        return whole
    return [part for row in range(rows) for part in _parts_of_row(row, edges[row % len(edges)], allowed)]


def _parts_of_row(row: int, edges: list[int], allowed: Tensor) -> Iterator[Part]:
    source = row % len(allowed)
    for begin, end in pairwise(edges):
        yield Part(slice(row, row + 1), slice(begin, end), allowed[source : source + 1, begin:end, begin:end])


def _edges(meet: Tensor, allowed: Tensor) -> list[int]:
    """Returns where the sequences of a row begin, and where it ends; `meet` says which neighbours attend.

    Neighbouring tokens that attend to themselves alone, such as padding, are one part. A row with a pair that crosses
    from one sequence to another is one part.
    """
    length = len(allowed)
    edges = [0, *((~meet).nonzero().flatten() + 1).tolist(), length]
    is_single = [end - begin == 1 for begin, end in pairwise(edges)]
    edges = [
        edge
        for number, edge in enumerate(edges)
        if not (0 < number < len(is_single) and is_single[number - 1] and is_single[number])
    ]
    inside = sum(int(allowed[begin:end, begin:end].count_nonzero()) for begin, end in pairwise(edges))
    return edges if inside == int(allowed.count_nonzero()) else [0, length]
