"""Two custom operators that show a tensor to a Python listener while a compiled graph runs.

Dynamo and AOTAutograd keep a custom operator as one node, so watching breaks no graph, and PyTorch runs the node. The
forward makes a stamp, the numbers of the step and the call, which the backward gets together with the gradient.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._guards import TracingContext
from torch.fx.node import has_side_effect


class Listener:
    """The interface of a listener."""

    def forward(self, key: str, tensor: torch.Tensor) -> list[int]:
        """Called with a tensor of a forward pass. Returns the stamp that comes back with its gradient."""
        raise NotImplementedError

    def backward(self, key: str, stamp: list[int], gradient: torch.Tensor) -> None:
        """Called with the gradient of a watched tensor, and its stamp."""
        raise NotImplementedError


STAMP_NUMBERS = 2
"""The count of numbers in a stamp: the step, and the call of the module in that step."""

_LISTENERS: WeakValueDictionary[str, Listener] = WeakValueDictionary()


def listen(name: str, listener: Listener) -> None:
    """Register a listener under a name, for as long as it lives."""
    _LISTENERS[name] = listener


@torch.library.custom_op("ort_accel::watch", mutates_args=())
def watch(tensor: torch.Tensor, listener: str, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Show a tensor to a listener. Returns a copy of it, and the listener's stamp."""
    # During capture the operator may run on constants of the graph, which are not shown.
    target = None if TracingContext.try_get() else _LISTENERS.get(listener)
    stamp = [-1] * STAMP_NUMBERS if target is None else target.forward(key, tensor.detach())
    return tensor.clone(), torch.tensor(stamp)


@torch.library.custom_op("ort_accel::watch_gradient", mutates_args=())
def watch_gradient(gradient: torch.Tensor, stamp: torch.Tensor, listener: str, key: str) -> torch.Tensor:
    """Show a gradient to a listener. Returns a copy of it."""
    target = _LISTENERS.get(listener)
    if target is not None:
        target.backward(key, stamp.tolist(), gradient.detach())
    return gradient.clone()


@watch.register_fake
def _(tensor: torch.Tensor, listener: str, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor.clone(), torch.empty(STAMP_NUMBERS, dtype=torch.int64)


@watch_gradient.register_fake
def _(gradient: torch.Tensor, stamp: torch.Tensor, listener: str, key: str) -> torch.Tensor:
    return gradient.clone()


def _save_stamp(ctx: Any, inputs: tuple[torch.Tensor, str, str], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.listener, ctx.key = inputs[1:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _watch_backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return watch_gradient(gradient, ctx.saved_tensors[0], ctx.listener, ctx.key), None, None


# A watched tensor that nothing uses must stay in the graph, as in eager PyTorch.
has_side_effect(torch.ops.ort_accel.watch.default)
watch.register_autograd(_watch_backward, setup_context=_save_stamp)
