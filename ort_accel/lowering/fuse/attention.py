"""PyTorch's fused attention for the CPU in single precision, where its 16-bit kernels are slower with nothing to gain.

Both directions of the kernel add up in single precision anyway, so the results only become more precise. Milliseconds
for 6 heads of 64, with casts, on an AMD EPYC (Zen 4, AVX512-BF16, two threads) and torch 2.13:

    gradient, batch x tokens    8 x 32   8 x 64   8 x 128   4 x 192   4 x 256   4 x 384
    in bfloat16                   1.54     3.58      8.02      4.84      7.96      15.9
    in float16                    2.29     8.53      34.4      38.5      68.9       160
    in float32                    0.55     1.48      4.19      4.74      8.31      19.5

The forward takes the same time in bfloat16 and float32, and 1.7 to 2.4 times as long in float16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ort_accel.lowering.nodes import is_part
from ort_accel.lowering.sizes import hint

aten = torch.ops.aten

FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

LONGEST: dict[tuple[Any, torch.dtype], float] = {
    (BACKWARD, torch.bfloat16): 128,
    (BACKWARD, torch.float16): float("inf"),
    (FORWARD, torch.float16): float("inf"),
}
"""Tokens, as far as single precision is faster."""


def widen_attention(graph: fx.Graph) -> int:
    """Put casts around fused attention where that is faster; returns how often."""
    found = [node for target in (FORWARD, BACKWARD) for node in graph.find_nodes(op="call_function", target=target)]
    slow = [node for node in found if _is_slow(node)]
    for node in slow:
        _widen(graph, node)
    return len(slow)


def _is_slow(node: fx.Node) -> bool:
    tensors = [argument.meta["val"] for argument in node.args[:4] if isinstance(argument, fx.Node)]
    longest = LONGEST.get((node.target, tensors[0].dtype), 0)
    return max(hint(tensor.shape[-2]) for tensor in tensors) <= longest


def _widen(graph: fx.Graph, node: fx.Node) -> None:
    narrow = next(argument for argument in node.args if isinstance(argument, fx.Node)).meta["val"].dtype
    casts: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(node):
        for argument in node.all_input_nodes:
            if argument.meta["val"].dtype == narrow:
                casts[argument] = _cast(graph, argument, torch.float32, node)
    node.args = fx.map_arg(node.args, lambda argument: casts.get(argument, argument))
    node.kwargs = fx.map_arg(node.kwargs, lambda argument: casts.get(argument, argument))
    node.meta["val"] = tuple(value.to(torch.float32) for value in node.meta["val"])
    for part in [user for user in node.users if is_part(user)]:
        if part.meta["val"].dtype == narrow:
            part.meta["val"] = part.meta["val"].to(torch.float32)
            with graph.inserting_after(part):
                back = _cast(graph, part, narrow, node)
            part.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)  # type: ignore[misc]


def _cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    cast = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
    cast.meta = {**like.meta, "val": source.meta["val"].to(dtype)}
    return cast
