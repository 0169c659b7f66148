"""Hoists casts of weights out of a graph, so that the cast weights are kept from micro-batch to micro-batch.

Each hoisted cast becomes a graph input. The program computes these inputs first, from `runtime.weight_copies`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ort_accel.graph.meta_keys import CAST_OF
from ort_accel.passes.common import CAST, pinned_tensors, source_of
from ort_accel.passes.options import PassOptions

NARROW = (torch.bfloat16, torch.float16)


def hoist_weight_casts(graph: fx.Graph, options: PassOptions) -> int:
    """Replace each cast of a cached weight to 16 bits by a new last input; returns how many."""
    assert options.is_cached_weight is not None
    pinned = pinned_tensors(graph) - set(graph.output_node().all_input_nodes)
    casts = graph.find_nodes(op="call_function", target=CAST)
    found = [node for node in casts if _is_of_weight(node, options.is_cached_weight, pinned)]
    for node in found:
        _hoist(graph, node)
    return len(found)


def _is_of_weight(node: fx.Node, is_cached: Callable[[fx.Node], bool], pinned: set[fx.Node]) -> bool:
    weight = node.args[0]
    if not isinstance(weight, fx.Node) or weight.op != "placeholder" or not is_cached(weight) or weight in pinned:
        return False
    before, after = weight.meta["val"], node.meta["val"]
    is_narrowing = before.dtype == torch.float32 and after.dtype in NARROW and before.device == after.device
    return bool(is_narrowing and set(node.kwargs) <= {"dtype", "layout", "device"} and node not in pinned)


def _hoist(graph: fx.Graph, cast: fx.Node) -> None:
    weight = source_of(cast)
    *_, last = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last):
        copy = graph.placeholder(f"{weight.name}_copy")
    copy.meta = {**cast.meta, CAST_OF: weight.name}
    cast.replace_all_uses_with(copy)
    graph.erase_node(cast)
