"""Where PyTorch's operators put their results: the largest in ONNX Runtime's pool, others into plain blocks.

Those that PyTorch takes itself leave gaps in the memory of a C library that does not join what it cut off: of a BERT of
six layers of 384, eight rows of 128 tokens, the resident set grew by 195 to 222 MiB then, and by 181 to 203 since,
where MKL multiplies; oneDNN takes memory by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.graph.memory_layout import is_plain
from ort_accel.graph.symbolic_sizes import hinted_bytes, is_known
from ort_accel.memory.heap_tensors import LEAST, unfilled
from ort_accel.memory.malloc_settings import leaves_gaps
from ort_accel.runtime.ort_pool import ITEM_TYPES, pooled_zeros
from ort_accel.runtime.picklable_closures import made_by

LARGE = 32 << 20
"""From so many bytes on the C library takes memory from the system each time and gives it back each time, page by page.
Eager steps of a Llama with such scores, 62 MiB for 1,024 tokens and 16,000 words, took 65,000 new pages each, and spent
a tenth of their processor time in the kernel. The pool's memory stays."""

_PLACES_FOR_RESULTS = ("out", "grad_input")


@cache
def with_place(target: Any) -> tuple[Any, str] | None:
    """The overload of an operator that writes into a given tensor, with the name of that argument; None if PyTorch has
    none for the CPU that does so without a copy."""
    if not isinstance(target, torch._ops.OpOverload) or len(target._schema.returns) != 1:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        places = [argument.name for argument in other._schema.arguments if argument.is_out]
        rest = [(argument.name, str(argument.type)) for argument in other._schema.arguments if not argument.is_out]
        if len(places) == 1 and places[0] in _PLACES_FOR_RESULTS and rest == wanted and _is_direct(other):
            return other, places[0]
    return None


def _is_direct(target: Any) -> bool:
    """Whether an overload has a kernel for the CPU; an error for those of lists, which the dispatcher does not know."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CPU")


def is_for_pool(node: fx.Node) -> bool:
    """Whether the result of a node may be that large, in a type that the pool has memory for."""
    return _can_be_placed(node, LARGE) and node.meta["val"].dtype.itemsize in ITEM_TYPES


def is_placed(node: fx.Node, pooled: bool) -> bool:
    """Whether the result of a node is to be put somewhere. `pooled` says that large ones may be in the pool."""
    return _can_be_placed(node, _least(pooled))


def _can_be_placed(node: fx.Node, least: float) -> bool:
    """Whether a node gives one plain tensor of at least so many bytes, and can write it where it is told to."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type != "cpu" or not all(map(is_known, value.shape)):
        return False
    return hinted_bytes(value) >= least and is_plain(value) and with_place(node.target) is not None


def placed(target: Any, pooled: bool) -> Callable[..., Tensor]:
    """The operator, as a function of the result's type and sizes and of its own arguments."""
    found = with_place(target)
    assert found is not None
    other, place = found
    least = _least(pooled)

    def run(dtype: torch.dtype, sizes: Sequence[int], /, *args: Any, **kwargs: Any) -> Tensor:
        size = math.prod(sizes) * dtype.itemsize
        if size < least:
            return target(*args, **kwargs)  # type: ignore[no-any-return]
        make = pooled_zeros if pooled and size >= LARGE and dtype.itemsize in ITEM_TYPES else unfilled
        return other(*args, **kwargs, **{place: make(sizes, dtype)})  # type: ignore[no-any-return]

    run.__name__ = str(target).replace(".", "_") + "_placed"
    return made_by(run, placed, target, pooled)


def _least(pooled: bool) -> float:
    """From so many bytes on a result is better not where PyTorch would put it."""
    return LEAST if leaves_gaps() else LARGE if pooled else math.inf
