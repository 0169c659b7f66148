"""Casts of weights, taken out of a graph so that their results can be kept from micro-batch to micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ort_accel.passes.remove_redundant_casts import CAST, fixed_in
from ort_accel.runtime.weight_copies import WeightCopies

SMALLER = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WeightCast:
    """A weight among a graph's inputs, and the input that stands in for its smaller copy."""

    weight: fx.Node
    copy: fx.Node

    @property
    def dtype(self) -> torch.dtype:
        """The type of the copy."""
        dtype: torch.dtype = self.copy.meta["val"].dtype
        return dtype


def take_out(graph: fx.Graph, is_lasting: Callable[[fx.Node], bool]) -> list[WeightCast]:
    """Make an input, behind all others, of each cast of a lasting input into a smaller type."""
    fixed = fixed_in(graph) - set(graph.output_node().all_input_nodes)
    found = [
        node for node in graph.find_nodes(op="call_function", target=CAST) if _is_of_weight(node, is_lasting, fixed)
    ]
    return [_as_input(graph, node) for node in found]


def _is_of_weight(node: fx.Node, is_lasting: Callable[[fx.Node], bool], fixed: set[fx.Node]) -> bool:
    weight = node.args[0]
    if not isinstance(weight, fx.Node) or weight.op != "placeholder" or not is_lasting(weight) or weight in fixed:
        return False
    before, after = weight.meta["val"], node.meta["val"]
    is_smaller = before.dtype == torch.float32 and after.dtype in SMALLER and before.device == after.device
    return bool(is_smaller and set(node.kwargs) <= {"dtype", "layout", "device"} and node not in fixed)


def _as_input(graph: fx.Graph, cast: fx.Node) -> WeightCast:
    weight: Any = cast.args[0]
    *_, last = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last):
        copy = graph.placeholder(f"{weight.name}_copy")
    copy.meta = dict(cast.meta)
    cast.replace_all_uses_with(copy)
    graph.erase_node(cast)
    return WeightCast(weight, copy)


class CopiesOfWeights:
    """A segment that gives the copies."""

    def __init__(self, casts: Sequence[WeightCast], copies: WeightCopies) -> None:
        self._dtypes = [cast.dtype for cast in casts]
        self._copies = copies

    def __call__(self, tensors: list[Any], _: dict[str, int]) -> Sequence[torch.Tensor]:
        """Run with these weights."""
        return self._copies.cast(tensors, self._dtypes)
