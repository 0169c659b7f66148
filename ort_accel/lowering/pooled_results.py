"""Large results of PyTorch's operators, in memory of ONNX Runtime's pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.lowering.layouts import is_plain
from ort_accel.lowering.sizes import hinted_bytes, is_known
from ort_accel.runtime.pool import ITEM_TYPES, pooled_zeros

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
    """Whether a node gives one large tensor, as plain as those of the pool are, and can write it there."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.dtype.itemsize not in ITEM_TYPES:
        return False
    if not all(map(is_known, value.shape)) or hinted_bytes(value) < LARGE:
        return False
    return is_plain(value) and with_place(node.target) is not None


@cache
def in_pool(target: Any) -> Callable[..., Tensor]:
    """The operator, as a function of the result's type and sizes and of its own arguments."""
    found = with_place(target)
    assert found is not None
    other, place = found

    def run(dtype: torch.dtype, sizes: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
        if math.prod(sizes) * dtype.itemsize < LARGE or dtype.itemsize not in ITEM_TYPES:
            return target(*args, **kwargs)  # type: ignore[no-any-return]
        return other(*args, **kwargs, **{place: pooled_zeros(sizes, dtype)})  # type: ignore[no-any-return]

    run.__name__ = str(target).replace(".", "_") + "_in_pool"
    return run
