"""Subscribing to the modules of a model: what goes in, what comes out, and the gradients on their way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ort_accel.engine import recapture
from ort_accel.errors import OrtAccelError
from ort_accel.subscribers.watching import Listener, listen, watch

_NUMBERS = count()


@dataclass(frozen=True)
class Site:
    """Where a tensor was seen."""

    module: str
    """The module's name; empty for the model itself."""
    kind: str
    """The name of the module's class."""
    tensor: int
    """Which of the tensors of its inputs or outputs, in order."""
    step: int
    """Calls of the model before this one."""
    call: int
    """Calls of this module before this one, in the same step."""


class SubscriberBase:
    """What a subscriber can do; override what you want. What is not overridden costs nothing.

    The first two are part of the computation and may change it: they are captured with the model, so they must be
    made of torch operators. The others are called while the model runs, with the values; they look and change nothing.
    """

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A module is about to be called; the result is what it is called with."""
        return args, kwargs

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """A module was called; the result is its output from here on."""
        return output

    def on_input(self, site: Site, tensor: torch.Tensor) -> None:
        """A tensor goes into a module."""

    def on_output(self, site: Site, tensor: torch.Tensor) -> None:
        """A tensor comes out of a module."""

    def on_output_gradient(self, site: Site, gradient: torch.Tensor) -> None:
        """The backward comes to a module, with the gradient of what it gave out."""

    def on_input_gradient(self, site: Site, gradient: torch.Tensor) -> None:
        """The backward leaves a module, with the gradient of what it was given."""

    def on_subscribe(self, model: nn.Module) -> None:
        """The subscription begins."""

    def on_unsubscribe(self) -> None:
        """The subscription ends."""


def _overrides(subscriber: SubscriberBase, *names: str) -> bool:
    return any(getattr(type(subscriber), name) is not getattr(SubscriberBase, name) for name in names)


class SubscriberManager(Listener):
    """Subscribes to a model: `with SubscriberManager().subscribe(model, [...])`, or `unsubscribe()` at the end.

    A step is one call of the model; the numbering goes on through evaluation. What `torch.utils.checkpoint` computes
    again in the backward is not shown again.
    """

    def __init__(self) -> None:
        self.step = -1
        self._name = f"manager {next(_NUMBERS)}"
        self._model: nn.Module | None = None
        self._subscribers: tuple[SubscriberBase, ...] = ()
        self._handles: list[Any] = []
        self._kinds: dict[str, str] = {}
        self._calls: Counter[str] = Counter()

    def subscribe(self, model: nn.Module, subscribers: Sequence[SubscriberBase]) -> SubscriberManager:
        """Let the subscribers watch every module of a model, whether it is accelerated or not, now or later."""
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
        """Take everything off the model again."""
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
        """A tensor came by: count steps and calls, and tell those who want to know."""
        if torch._C._current_graph_task_id() != -1:
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
        """A gradient came by."""
        if not self._subscribers:
            return
        side, module, index = key.split("|")
        site = Site(module, self._kinds[module], int(index), *stamp)
        for subscriber in self._subscribers:
            (subscriber.on_input_gradient if side == "in" else subscriber.on_output_gradient)(site, gradient)

    def _any_overrides(self, *names: str) -> bool:
        return any(_overrides(one, *names) for one in self._subscribers)

    def _before(self, name: str) -> Callable[..., Any]:
        subscribers = [one for one in self._subscribers if _overrides(one, "before_forward")]
        watches = self._any_overrides("on_input", "on_input_gradient")
        manager = self._name

        def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            for subscriber in subscribers:
                args, kwargs = subscriber.before_forward(module, args, kwargs)
            if watches or not name:  # the model's own input begins a step
                args, kwargs = _watched((args, kwargs), manager, f"in|{name}", all_of_them=watches)
            return args, kwargs

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        subscribers = [one for one in self._subscribers if _overrides(one, "after_forward")]
        watches = self._any_overrides("on_output", "on_output_gradient")
        manager = self._name

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            for subscriber in subscribers:
                output = subscriber.after_forward(module, args, kwargs, output)
            return _watched(output, manager, f"out|{name}", all_of_them=True) if watches else output

        return hook


def _watched(tree: Any, manager: str, key: str, all_of_them: bool) -> Any:
    """The same tree, with its tensors watched: each, or only the first."""
    leaves, spec = pytree.tree_flatten(tree)
    shown: list[Any] = []
    number = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (all_of_them or number == 0):
            leaf = watch(leaf, manager, f"{key}|{number}")[0]
            number += 1
        shown.append(leaf)
    return pytree.tree_unflatten(shown, spec)
