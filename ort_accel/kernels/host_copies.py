"""Operators that copy saved values into host memory, and back for the backward.

`to_host` and `from_host` begin a copy. `moved` waits for its end: in front of the first reader of its result, and
behind the last reader of its source. It reads the source so that the source lives until then. All three keep their
position in the graph, which is chosen so that copies and kernels overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ort_accel.kernels.library import define, fake
from ort_accel.runtime.host_memory import host_memory

own = torch.ops.ort_accel


def is_host_copy(node: fx.Node) -> bool:
    """True if a node begins or ends a copy to host memory or back."""
    return getattr(node.target, "overloadpacket", None) in {own.to_host, own.from_host, own.moved}


def is_on_host(node: fx.Node) -> bool:
    """True if a node's value lies in host memory."""
    return getattr(node.target, "overloadpacket", None) is own.to_host


def _to_host(value: Tensor) -> Tensor:
    return host_memory(value.device).send(value)


def _from_host(kept: Tensor, device: torch.device) -> Tensor:
    return host_memory(device).fetch(kept)


def _moved(result: Tensor, source: Tensor) -> None:
    host_memory((source if result.device.type == "cpu" else result).device).settle(result)


define("to_host(Tensor value) -> Tensor", _to_host, "CPU", "CUDA")
define("from_host(Tensor kept, Device device) -> Tensor", _from_host, "CPU", "CUDA")
define("moved(Tensor(a!) result, Tensor source) -> ()", _moved, "CPU", "CUDA")


@fake("to_host")
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu")


@fake("from_host")
def _(kept: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(kept, device=device)


@fake("moved")
def _(*_: Tensor) -> None:
    return None
