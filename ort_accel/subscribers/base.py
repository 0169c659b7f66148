"""Subscriptions to the modules of a model: their inputs, their outputs, and the gradients of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ort_accel.engine import recapture
from ort_accel.errors import OrtAccelError
from ort_accel.subscribers.watching import Listener, listen, watch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_MANAGER_NUMBERS = count()


@dataclass(frozen=True)
class Site:
    """The position in a run at which a tensor was seen."""

    module: str
    """The module's name; empty for the model itself."""
    kind: str
    """The name of the module's class."""
    tensor: int
    """The tensor's index among the module's inputs or outputs."""
    step: int
    """The number of calls of the model before this one."""
    call: int
    """The number of calls of this module before this one, in the same step."""


class SubscriberBase:
    """The methods of a subscriber; override those that you need. A method that is not overridden costs nothing.

    `before_forward` and `after_forward` are part of the computation and may change it. They are captured with the
    model, so they must consist of torch operators. The others are called with the values while the model runs, and must
    not change them.
    """

    def before_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Returns the arguments with which a module is called."""
        return args, kwargs

    def after_forward(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        """Returns the output of a module that was called."""
        return output

    def on_input(self, site: Site, tensor: torch.Tensor) -> None:
        """Called with each input tensor of a module."""

    def on_output(self, site: Site, tensor: torch.Tensor) -> None:
        """Called with each output tensor of a module."""

    def on_output_gradient(self, site: Site, gradient: torch.Tensor) -> None:
        """Called with the gradient of each output tensor of a module."""

    def on_input_gradient(self, site: Site, gradient: torch.Tensor) -> None:
        """Called with the gradient of each input tensor of a module."""

    def on_subscribe(self, model: nn.Module) -> None:
        """Called when the subscription begins."""

    def on_unsubscribe(self) -> None:
        """Called when the subscription ends."""


def _overrides(subscriber: SubscriberBase, *names: str) -> bool:
    return any(getattr(type(subscriber), name) is not getattr(SubscriberBase, name) for name in names)


class SubscriberManager(Listener):
    """Manages the subscriptions to a model: `with SubscriberManager().subscribe(model, [...])`, or `unsubscribe()`.

    A step is one call of the model, in training or evaluation. Recomputations of `torch.utils.checkpoint` are not
    shown.
    """

    def __init__(self) -> None:
        self.step = -1
        self._name = f"manager {next(_MANAGER_NUMBERS)}"
        self._model: nn.Module | None = None
        self._subscribers: tuple[SubscriberBase, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._kinds: dict[str, str] = {}
        self._calls: Counter[str] = Counter()

    def subscribe(self, model: nn.Module, subscribers: Sequence[SubscriberBase]) -> SubscriberManager:
        """Subscribe to every module of a model. The model may be accelerated before, after, or not at all."""
        if self._model is not None:
            raise OrtAccelError("this SubscriberManager has a model already; unsubscribe first, or make another one")
        self._model, self._subscribers, self.step = model, tuple(subscribers), -1
        listen(self._name, self)
        for subscriber in self._subscribers:
            subscriber.on_subscribe(model)
        for name, module in model.named_modules():
            self._kinds[name] = type(module).__name__
            if not name or self._any_overrides("before_forward", "on_input", "on_input_gradient"):
                self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            if self._any_overrides("after_forward", "on_output", "on_output_gradient"):
                self._handles.append(module.register_forward_hook(self._after(name), with_kwargs=True))
        recapture(model)
        return self

    def unsubscribe(self) -> None:
        """Remove all hooks and end the subscriptions."""
        if self._model is None:
            return
        for handle in self._handles:
            handle.remove()
        recapture(self._model)
        for subscriber in self._subscribers:
            subscriber.on_unsubscribe()
        self._model, self._subscribers = None, ()
        self._handles.clear()
        self._kinds.clear()

    def __enter__(self) -> SubscriberManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.unsubscribe()

    def forward(self, key: str, tensor: torch.Tensor) -> list[int]:
        """Count steps and calls, and pass an input or output to the subscribers. Returns its step and call."""
        if torch._C._current_graph_task_id() != -1:  # a recomputation in the backward
            return [-1, -1]
        side, module, index = key.split("|")
        if side == "in" and index == "0" and not module:
            self.step += 1
            self._calls.clear()
        self._calls[key] += 1
        stamp = [self.step, self._calls[key] - 1]
        site = Site(module, self._kinds[module], int(index), *stamp)
        for subscriber in self._subscribers:
            (subscriber.on_input if side == "in" else subscriber.on_output)(site, tensor)
        return stamp

    def backward(self, key: str, stamp: list[int], gradient: torch.Tensor) -> None:
        """Pass a gradient to the subscribers."""
        if not self._subscribers:
            return
        side, module, index = key.split("|")
        site = Site(module, self._kinds[module], int(index), *stamp)
        for subscriber in self._subscribers:
            (subscriber.on_input_gradient if side == "in" else subscriber.on_output_gradient)(site, gradient)

    def _any_overrides(self, *names: str) -> bool:
        return any(_overrides(one, *names) for one in self._subscribers)

    def _before(self, name: str) -> Callable[[nn.Module, Args, Kwargs], tuple[Args, Kwargs]]:
        subscribers = [one for one in self._subscribers if _overrides(one, "before_forward")]
        watches = self._any_overrides("on_input", "on_input_gradient")
        manager = self._name

        def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            for subscriber in subscribers:
                args, kwargs = subscriber.before_forward(module, args, kwargs)
            if watches or not name:  # the model's own input begins a step
                args, kwargs = _watched((args, kwargs), manager, f"in|{name}", every_tensor=watches)
            return args, kwargs

        return hook

    def _after(self, name: str) -> Callable[[nn.Module, Args, Kwargs, Any], Any]:
        subscribers = [one for one in self._subscribers if _overrides(one, "after_forward")]
        watches = self._any_overrides("on_output", "on_output_gradient")
        manager = self._name

        def hook(module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
            for subscriber in subscribers:
                output = subscriber.after_forward(module, args, kwargs, output)
            return _watched(output, manager, f"out|{name}", every_tensor=True) if watches else output

        return hook


def _watched(tree: Any, manager: str, key: str, every_tensor: bool) -> Any:
    """Returns the same structure with every tensor watched, or only the first one."""
    leaves, spec = pytree.tree_flatten(tree)
    watched: list[object] = []
    number = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (every_tensor or number == 0):
            leaf = watch(leaf, manager, f"{key}|{number}")[0]
            number += 1
        watched.append(leaf)
    return pytree.tree_unflatten(watched, spec)
