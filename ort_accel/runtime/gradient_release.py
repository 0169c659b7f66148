"""Handing a gradient to its parameter while a backward is still running.

PyTorch gives parameters their gradients when the node of the autograd graph that made them has run to its end, and for
a model that is compiled as a whole that is the end of the backward. Here a gradient is accumulated, and those who wait
for it are called, in the midst of that. It relies on which node autograd says that it runs, and on what follows that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ort_accel.errors import OrtAccelError
from ort_accel.reporting import Report

FEATURE = "memory.early_gradient_release"

SECOND_SOURCE = (
    "a parameter of shape {shape} was given its gradient early, and then a second one in the same backward: it is used "
    "by something besides the compiled graph, or by several calls of it, and whoever waits for its gradient was called "
    "already; set memory.early_gradient_release: false for such a training"
)


@dataclass(eq=False)
class _Leaf:
    """A parameter that somebody waits for."""

    backward: int = -1
    """The last backward in which it was given its gradient early."""

    @property
    def has_its_gradient(self) -> bool:
        """Whether it was given its gradient in the backward that runs now."""
        return self.backward == torch._C._current_graph_task_id()

    def refuse_second(self, gradient: Tensor | None) -> None:
        """Raise if it is given another one; autograd comes with None where it has nothing."""
        if gradient is not None and self.has_its_gradient:
            raise OrtAccelError(SECOND_SOURCE.format(shape=tuple(gradient.shape)))


@dataclass(eq=False)
class _Once:
    """Somebody who waits for a gradient. Autograd calls them at the end of a backward, even where it has nothing."""

    hook: Callable[[Tensor], None]
    leaf: _Leaf

    def __call__(self, parameter: Tensor) -> None:
        if not self.leaf.has_its_gradient:
            self.hook(parameter)


class Leaves:
    """The parameters of one model, and how they get their gradients."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._leaves: Any = WeakIdKeyDictionary()
        self._handles: list[Any] = []

    def close(self) -> None:
        """Watch no parameter any more, and begin anew where one gets a gradient after all."""
        self._leaves.clear()
        while self._handles:
            self._handles.pop().remove()

    def hand_over(self, gradients: list[Any], edges: Sequence[int], tensors: int) -> list[Tensor | None]:
        """Give parameters their gradients; what cannot be given is returned. The list is emptied.

        `edges` tells for each gradient which of the tensors it belongs to that the forward was called with, and
        `tensors` how many these were.
        """
        node = torch._C._current_autograd_node()
        targets = node.next_functions if node is not None and not torch.is_grad_enabled() else ()
        if len(targets) != tensors:  # a node that something has put around the compiled graph
            kept, gradients[:] = list(gradients), []
            return kept
        return [self._give(targets[edge][0], gradients.pop(0)) for edge in edges]

    def _give(self, function: Any, gradient: Tensor) -> Tensor | None:
        parameter = getattr(function, "variable", None)
        if parameter is None or not _fits(gradient, parameter) or not _gets_gradient(function):
            return gradient
        leaf, hooks = self._leaves.get(parameter), parameter._post_accumulate_grad_hooks
        if not hooks or len(parameter._backward_hooks or ()) > (leaf is not None):  # those may change the gradient
            return gradient
        leaf = leaf or self._watched(parameter)
        leaf.refuse_second(gradient)
        _accumulate(parameter, gradient)
        del gradient  # so that it is gone once a hook has used it up
        for key in list(hooks):
            if key in hooks:  # which a hook may have taken away
                once = hooks[key] = hooks[key] if isinstance(hooks[key], _Once) else _Once(hooks[key], leaf)
                once(parameter)
        leaf.backward = torch._C._current_graph_task_id()
        return None

    def _watched(self, parameter: Tensor) -> _Leaf:
        """A parameter that gets its gradient early from now on."""
        leaf = self._leaves[parameter] = _Leaf()
        self._handles.append(parameter.register_hook(leaf.refuse_second))  # type: ignore[no-untyped-call]
        self._report.applied(FEATURE, f"{len(self._leaves)} parameters get their gradients before the backward ends")
        return leaf


def _fits(gradient: Tensor, parameter: Tensor) -> bool:
    """Whether autograd would take a gradient as it is."""
    return (gradient.shape, gradient.dtype, gradient.device) == (parameter.shape, parameter.dtype, parameter.device)


def _gets_gradient(function: Any) -> bool:
    """Whether this backward is one that accumulates into a parameter, and not `torch.autograd.grad`."""
    try:
        return bool(torch._C._will_engine_execute_node(function))
    except RuntimeError:  # how it answers for parameters in `torch.autograd.grad`
        return False


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """What autograd's accumulation does: memory is taken over where it lies as the parameter does."""
    if parameter.grad is not None:
        parameter.grad += gradient
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
