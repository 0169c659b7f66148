"""Operators that move what the forward keeps into host memory, and back for the backward.

`to_host` and `from_host` begin a copy. `moved` stands where it must have ended: in front of the first reader of its
result, and behind the last reader of its source, which it reads so that the source lives until then. All three keep
their place among all other operators, since where they stand is what they are for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.library import Library, register_fake

from ort_accel.runtime.host_memory import host_memory

LIBRARY: Any = Library("ort_accel", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("to_host(Tensor value) -> Tensor")
LIBRARY.define("from_host(Tensor kept, Device device) -> Tensor")
LIBRARY.define("moved(Tensor(a!) result, Tensor source) -> ()")

own = torch.ops.ort_accel

MOVES = {own.to_host, own.from_host, own.moved}


def is_move(node: fx.Node) -> bool:
    """Whether a node begins or ends a copy to host memory or back."""
    return getattr(node.target, "overloadpacket", None) in MOVES


def is_on_host(node: fx.Node) -> bool:
    """Whether a node's value lies in host memory."""
    return getattr(node.target, "overloadpacket", None) is own.to_host


def _to_host(value: Tensor) -> Tensor:
    return host_memory(value.device).send(value)


def _from_host(kept: Tensor, device: torch.device) -> Tensor:
    return host_memory(device).fetch(kept)


def _moved(result: Tensor, source: Tensor) -> None:
    host_memory((source if result.device.type == "cpu" else result).device).settle(result)


for _name, _kernel in {"to_host": _to_host, "from_host": _from_host, "moved": _moved}.items():
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _device)


@register_fake("ort_accel::to_host")  # type: ignore[untyped-decorator]
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu")


@register_fake("ort_accel::from_host")  # type: ignore[untyped-decorator]
def _(kept: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(kept, device=device)


@register_fake("ort_accel::moved")  # type: ignore[untyped-decorator]
def _(*_: Tensor) -> None:
    return None
