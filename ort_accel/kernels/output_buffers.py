"""Buffers for the results of PyTorch's operators, in plain heap blocks.

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
from ort_accel.runtime.picklable_closures import picklable_by

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


def needs_buffer(node: fx.Node) -> bool:
    """True if a node returns one plain large tensor that fragments the heap, and can write it into a buffer."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type != "cpu" or not all(map(is_known, value.shape)):
        return False
    is_large = fragments_heap() and hinted_bytes(value) >= LEAST_BYTES
    return is_large and is_plain(value) and out_overload(node.target) is not None


def with_buffer(target: Any) -> Callable[..., Tensor]:
    """Return the operator as a function of its result's type and sizes and of its own arguments."""
    found = out_overload(target)
    assert found is not None
    overload, out = found

    def run(dtype: torch.dtype, sizes: Sequence[int], /, *args: Any, **kwargs: Any) -> Tensor:
        if not fragments_heap() or math.prod(sizes) * dtype.itemsize < LEAST_BYTES:
            return target(*args, **kwargs)  # type: ignore[no-any-return]
        return overload(*args, **kwargs, **{out: empty_in_heap(sizes, dtype)})  # type: ignore[no-any-return]

    run.__name__ = str(target).replace(".", "_") + "_placed"
    return picklable_by(run, with_buffer, target)
