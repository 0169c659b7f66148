"""`precision.cast_propagation`: removes casts of autocast that are repeated or undone.

1. Casts of one tensor to one dtype become one cast.
2. A cast to a wider dtype and back, with only views between, is removed.

No bit of a result changes.
"""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.graph.meta_keys import PARTITIONER_TAG, RECOMPUTE
from ort_accel.passes.common import (
    CAST,
    copy_views,
    is_cast,
    pinned_tensors,
    source_of,
    strides_of,
    tensors_behind,
    views_behind,
)
from ort_accel.passes.options import PassOptions

LOSSLESS = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}
"""Casts, as source and result dtype, that keep every value, NaN and infinity included."""


def remove_redundant_casts(graph: fx.Graph, _: PassOptions) -> int:
    """Remove casts that are repeated or undone; returns how many."""
    pinned = pinned_tensors(graph)
    return _remove_round_trips(graph, pinned) + _remove_repeated(graph, pinned)


def _casts(graph: fx.Graph, pinned: set[fx.Node]) -> list[fx.Node]:
    """Returns casts that change only the dtype, and whose result the graph neither returns nor writes into."""
    return [
        node
        for node in graph.find_nodes(op="call_function", target=CAST)
        if set(node.kwargs) <= {"dtype", "layout", "device"}
        and node.meta["val"].device == source_of(node).meta["val"].device
        and RECOMPUTE not in node.meta
        and pinned.isdisjoint([node, *tensors_behind(node)])
    ]


def _remove_repeated(graph: fx.Graph, pinned: set[fx.Node]) -> int:
    """Cast a tensor to a dtype once in each half of the graph, so that the backward's casts are not saved for it."""
    first: dict[tuple[fx.Node, torch.dtype, str | None], fx.Node] = {}
    count = 0
    for node in _casts(graph, pinned):
        key = (source_of(node), node.meta["val"].dtype, node.meta.get(PARTITIONER_TAG))
        if first.setdefault(key, node) is not node:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
            count += 1
    return count


def _remove_round_trips(graph: fx.Graph, pinned: set[fx.Node]) -> int:
    """Remove casts to a wider dtype and back."""
    count = 0
    for node in _casts(graph, pinned):
        views = views_behind(node)
        widening = source_of(views[-1] if views else node)
        if not (is_cast(widening) and pinned.isdisjoint(tensors_behind(widening))):
            continue
        source = source_of(widening)
        narrow, wide = source.meta["val"], widening.meta["val"]
        is_undone = (narrow.dtype, wide.dtype) in LOSSLESS and node.meta["val"].dtype == narrow.dtype
        if is_undone and strides_of(narrow) == strides_of(wide):
            node.replace_all_uses_with(copy_views(graph, source, views))
            for unused in [node, *views, widening]:
                if not unused.users:
                    graph.erase_node(unused)
            count += 1
    return count
