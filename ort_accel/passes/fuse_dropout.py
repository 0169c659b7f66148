"""Applies a dropout's mask as bits where its bits are saved, so that no mask of bytes is made.

A mask that the forward packs for the backward (`recompute/pack_masks.py`) is drawn as bits, and one operator reads them
in either direction. Results have eager's bits: the gradient's factor is rounded to the type of the gradient first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import fx

from ort_accel.graph.memory_layout import is_plain
from ort_accel.graph.symbolic_sizes import known_equal
from ort_accel.kernels.bit_mask import own
from ort_accel.kernels.dropout_mask import kept, kept_bits
from ort_accel.native.run_kernel import ELEMENTS
from ort_accel.passes.common import source_of
from ort_accel.passes.options import PassOptions

aten = torch.ops.aten


def fuse_dropout(graph: fx.Graph, _: PassOptions) -> int:
    """Fuse dropouts whose bits exist; returns how many."""
    packed = graph.find_nodes(op="call_function", target=own.to_bits.default)
    count = sum(_apply_bits(source_of(bits), bits) for bits in packed)
    for bits in packed:
        _draw_bits(graph, source_of(bits), bits)
    unpacked = graph.find_nodes(op="call_function", target=own.from_bits.default)
    count += sum(_apply_bits(mask, source_of(mask)) for mask in unpacked)
    for mask in [mask for mask in unpacked if not mask.users]:
        graph.erase_node(mask)
    return count


def _apply_bits(mask: fx.Node, bits: fx.Node) -> int:
    """Lets the dropouts and gradients that read a mask read its bits; returns how many do."""
    found = [*_dropouts(mask), *_gradients(mask)]
    for node, source, scale in found:
        with node.graph.inserting_before(node):
            applied = node.graph.call_function(own.apply_bits.default, (source, bits, scale))
        applied.meta = dict(node.meta)
        node.replace_all_uses_with(applied)
        node.graph.erase_node(node)
    for user in [user for user in mask.users if user.target is aten._to_copy.default]:
        for node in [*(reader for reader in user.users if not reader.users), user]:
            if not node.users:
                node.graph.erase_node(node)
    return len(found)


def _dropouts(mask: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, float]]:
    """Yields the nodes that compute `source * mask * scale`, with the source and the scale."""
    for node in mask.users:
        if node.target is aten.native_dropout_backward.default and node.args[1] is mask:
            source, _, scale = node.args
            if isinstance(source, fx.Node) and _fits(source, mask):
                yield node, source, cast("float", scale)


def _gradients(mask: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, float]]:
    """Yields the same for `grad * (mask * scale)`, which rounds the scale first."""
    casts = [user for user in mask.users if user.target is aten._to_copy.default]
    for factor in [user for cast_mask in casts for user in cast_mask.users if user.target is aten.mul.Scalar]:
        dtype = factor.meta["val"].dtype
        for node in [user for user in factor.users if user.target is aten.mul.Tensor]:
            grads = [operand for operand in node.all_input_nodes if operand is not factor]
            if len(grads) == 1 and grads[0].meta["val"].dtype == dtype and _fits(grads[0], mask) and _fits(node, mask):
                yield node, grads[0], torch.tensor(factor.args[1], dtype=dtype).item()


def _draw_bits(graph: fx.Graph, mask: fx.Node, bits: fx.Node) -> None:
    """Draws a mask as bits if nothing else reads it."""
    if mask.target is not kept or list(mask.users) != [bits]:
        return
    with graph.inserting_before(mask):
        drawn = graph.call_function(kept_bits, mask.args)
    drawn.meta = {**mask.meta, "val": bits.meta["val"]}
    bits.replace_all_uses_with(drawn)
    graph.erase_node(bits)
    graph.erase_node(mask)


def _fits(tensor: fx.Node, mask: fx.Node) -> bool:
    """True if a tensor lies in memory as the mask does, element by element."""
    value, of_mask = tensor.meta["val"], mask.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype not in ELEMENTS or value.ndim != of_mask.ndim:
        return False
    return is_plain(value) and is_plain(of_mask) and all(map(known_equal, value.shape, of_mask.shape))
