"""Runs PyTorch's fused CPU attention in float32 where its 16-bit kernels are slower."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from ort_accel.graph.nodes import is_getitem
from ort_accel.graph.symbolic_sizes import hint
from ort_accel.kernels.attention_precision import FLASH_BACKWARD, FLASH_FORWARD, is_faster_in_float32
from ort_accel.passes.common import CAST
from ort_accel.passes.options import PassOptions


def upcast_attention(graph: fx.Graph, _: PassOptions) -> int:
    """Put casts around fused attention where float32 is faster; returns how often."""
    found = [
        node
        for target in (FLASH_FORWARD, FLASH_BACKWARD)
        for node in graph.find_nodes(op="call_function", target=target)
    ]
    slow = [node for node in found if _is_slow(node)]
    for node in slow:
        _upcast(graph, node)
    return len(slow)


def _is_slow(node: fx.Node) -> bool:
    tensors = [argument.meta["val"] for argument in node.args[:4] if isinstance(argument, fx.Node)]
    return is_faster_in_float32(node.target, tensors[0].dtype, max(hint(tensor.shape[-2]) for tensor in tensors))


def _upcast(graph: fx.Graph, node: fx.Node) -> None:
    narrow = next(argument for argument in node.args if isinstance(argument, fx.Node)).meta["val"].dtype
    casts: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(node):
        for argument in node.all_input_nodes:
            if argument.meta["val"].dtype == narrow:
                casts[argument] = _cast(graph, argument, torch.float32, node.meta)
    node.args = fx.map_arg(node.args, lambda argument: casts.get(argument, argument))
    node.kwargs = fx.map_arg(node.kwargs, lambda argument: casts.get(argument, argument))
    node.meta["val"] = tuple(value.to(torch.float32) for value in node.meta["val"])
    for part in [user for user in node.users if is_getitem(user)]:
        if part.meta["val"].dtype == narrow:
            part.meta["val"] = part.meta["val"].to(torch.float32)
            with graph.inserting_after(part):
                back = _cast(graph, part, narrow, node.meta)
            part.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)  # type: ignore[misc]


def _cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype, meta: Mapping[str, object]) -> fx.Node:
    cast = graph.call_function(CAST, (source,), {"dtype": dtype})
    cast.meta = {**meta, "val": source.meta["val"].to(dtype)}
    return cast
