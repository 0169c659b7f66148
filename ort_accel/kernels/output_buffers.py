"""Buffers for the results of PyTorch's operators: the largest in ONNX Runtime's pool, others in plain heap blocks.

PyTorch's own allocations are aligned, which leaves gaps in the heap of a C library that does not join freed blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ort_accel.graph.memory_layout import is_plain
from ort_accel.graph.symbolic_sizes import hinted_bytes, is_known
from ort_accel.memory.heap_tensors import LEAST_BYTES, empty_in_heap
from ort_accel.memory.malloc_settings import fragments_heap
from ort_accel.runtime.ort_pool import TYPE_BY_ITEM_BYTES, pooled_zeros
from ort_accel.runtime.picklable_closures import picklable_by

POOL_LEAST_BYTES = 32 << 20
"""Bytes from which on a result lies in the pool. The C library maps memory of that size anew for each tensor, page by
page; the pool keeps it."""

_OUT_ARGUMENTS = ("out", "grad_input")


@cache
def out_overload(target: Any) -> tuple[OpOverload[..., Any], str] | None:
    """Return the overload that writes into a given tensor, and that argument's name; None if each of them copies."""
    if not isinstance(target, OpOverload) or len(target._schema.returns) != 1:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        outs = [argument.name for argument in other._schema.arguments if argument.is_out]
        rest = [(argument.name, str(argument.type)) for argument in other._schema.arguments if not argument.is_out]
        if len(outs) == 1 and outs[0] in _OUT_ARGUMENTS and rest == wanted and _has_cpu_kernel(other):
            return other, outs[0]
    return None


def _has_cpu_kernel(target: OpOverload[..., Any]) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CPU")  # type: ignore[no-untyped-call]


def belongs_in_pool(node: fx.Node) -> bool:
    """True if a node's result may lie in the pool: it is large, and of a type that the pool has memory for."""
    return _can_be_placed(node, POOL_LEAST_BYTES) and node.meta["val"].dtype.itemsize in TYPE_BY_ITEM_BYTES


def needs_buffer(node: fx.Node, pooled: bool) -> bool:
    """True if a node's result gets a buffer of ours. `pooled` allows the pool for large ones."""
    return _can_be_placed(node, _least_bytes(pooled))


def _can_be_placed(node: fx.Node, least_bytes: float) -> bool:
    """True if a node returns one plain tensor of at least so many bytes, and can write it into a buffer."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type != "cpu" or not all(map(is_known, value.shape)):
        return False
    return hinted_bytes(value) >= least_bytes and is_plain(value) and out_overload(node.target) is not None


def with_buffer(target: Any, pooled: bool) -> Callable[..., Tensor]:
    """Return the operator as a function of its result's type and sizes and of its own arguments."""
    found = out_overload(target)
    assert found is not None
    overload, out = found
    least_bytes = _least_bytes(pooled)

    def run(dtype: torch.dtype, sizes: Sequence[int], /, *args: Any, **kwargs: Any) -> Tensor:
        size_bytes = math.prod(sizes) * dtype.itemsize
        if size_bytes < least_bytes:
            return target(*args, **kwargs)  # type: ignore[no-any-return]
        make = (
            pooled_zeros
            if pooled and size_bytes >= POOL_LEAST_BYTES and dtype.itemsize in TYPE_BY_ITEM_BYTES
            else empty_in_heap
        )
        return overload(*args, **kwargs, **{out: make(sizes, dtype)})  # type: ignore[no-any-return]

    run.__name__ = str(target).replace(".", "_") + "_placed"
    return picklable_by(run, with_buffer, target, pooled)


def _least_bytes(pooled: bool) -> float:
    """Return the size from which on a result gets a buffer of ours."""
    return LEAST_BYTES if fragments_heap() else POOL_LEAST_BYTES if pooled else math.inf
