"""Two operators that hand a tensor to Python while a compiled graph runs, and pass it on.

Dynamo and AOTAutograd take a custom operator as it is, so that watching breaks no graph: the graph holds one node for
what is watched, and PyTorch runs it. The backward needs no bookkeeping either: a stamp, made in the forward, goes with
the gradient and says which step and call it belongs to.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._guards import TracingContext
from torch.fx.node import has_side_effect


class Listener:
    """Is told of each tensor that comes by."""

    def forward(self, key: str, tensor: torch.Tensor) -> list[int]:
        """A tensor in a forward pass; the answer comes back with its gradient."""
        raise NotImplementedError

    def backward(self, key: str, stamp: list[int], gradient: torch.Tensor) -> None:
        """The gradient of a tensor that was seen in a forward pass."""
        raise NotImplementedError


STAMP = 2
"""Numbers in a stamp: the step, and which call of the module in it."""

_LISTENERS: WeakValueDictionary[str, Listener] = WeakValueDictionary()


def listen(name: str, listener: Listener) -> None:
    """Let a listener have what is watched under its name, while it lives."""
    _LISTENERS[name] = listener


@torch.library.custom_op("ort_accel::watch", mutates_args=())
def watch(tensor: torch.Tensor, listener: str, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values, shown to a listener, and the listener's stamp."""
    # While a graph is captured, constants in it are computed ahead.
    told = None if TracingContext.try_get() else _LISTENERS.get(listener)
    stamp = [-1] * STAMP if told is None else told.forward(key, tensor.detach())
    return tensor.clone(), torch.tensor(stamp)


@torch.library.custom_op("ort_accel::watch_gradient", mutates_args=())
def watch_gradient(gradient: torch.Tensor, stamp: torch.Tensor, listener: str, key: str) -> torch.Tensor:
    """The same gradient, shown to a listener."""
    told = _LISTENERS.get(listener)
    if told is not None:
        told.backward(key, stamp.tolist(), gradient.detach())
    return gradient.clone()


@watch.register_fake
def _(tensor: torch.Tensor, listener: str, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor.clone(), torch.empty(STAMP, dtype=torch.int64)


@watch_gradient.register_fake
def _(gradient: torch.Tensor, stamp: torch.Tensor, listener: str, key: str) -> torch.Tensor:
    return gradient.clone()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.listener, ctx.key = inputs[1:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _pass_back(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[Any, None, None]:
    return watch_gradient(gradient, ctx.saved_tensors[0], ctx.listener, ctx.key), None, None


# What nothing uses is shown, too, as in eager PyTorch.
has_side_effect(torch.ops.ort_accel.watch.default)
watch.register_autograd(_pass_back, setup_context=_keep)
