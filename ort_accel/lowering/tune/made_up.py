"""Inputs to measure with: of the right sizes, types and layouts, with numbers that any operator takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_accel.lowering.program import Symbols
from ort_accel.lowering.sizes import SymbolSource, hint


def made_up(value: Any) -> Any:
    """A value like this one, at the sizes that the graph was captured with.

    Floats are small and of both signs, so that they neither overflow nor vanish on a long way. Integers are 0, an index
    that every table has.
    """
    if not isinstance(value, torch.Tensor):
        return hint(value) if isinstance(value, torch.SymInt) else value
    sizes, strides = [hint(size) for size in value.shape], [hint(stride) for stride in value.stride()]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0
    return _numbers(extent, value.dtype, value.device).as_strided(sizes, strides)


def _numbers(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.empty(count, dtype=dtype, device=device).uniform_(-0.1, 0.1)
    return torch.full((count,), dtype == torch.bool, dtype=dtype, device=device)


def symbols_of(graph: fx.Graph) -> Symbols:
    """The value that each symbol had when the graph was captured."""
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    source, symbols = SymbolSource(), Symbols()
    for position, value in enumerate(values):
        source.learn(position, value)
    hinted = [_Hinted(value) if isinstance(value, torch.Tensor) else made_up(value) for value in values]
    source.read(hinted, symbols)
    return symbols


class _Hinted:
    """Has a tensor's sizes, and no memory."""

    def __init__(self, fake: torch.Tensor) -> None:
        self.shape = [hint(size) for size in fake.shape]
