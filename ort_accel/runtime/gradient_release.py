"""Release of gradients to their parameters while a backward is still running.

PyTorch accumulates gradients when the autograd node that made them has ended, which for a model in one graph is the end
of the backward. Here a gradient is accumulated, and its hooks are called, as soon as it exists. This relies on the node
that autograd says it runs, and on the nodes that follow it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ort_accel.errors import OrtAccelError
from ort_accel.reporting.report import Report

FEATURE = "memory.early_gradient_release"

SECOND_GRADIENT = (
    "a parameter of shape {shape} was given its gradient early, and then a second one in the same backward: it is used "
    "by something besides the compiled graph, or by several calls of it, and whoever waits for its gradient was called "
    "already; set memory.early_gradient_release: false for such a training"
)


@dataclass(eq=False)
class _Parameter:
    """The state of a parameter whose gradient is released early."""

    last_backward: int = -1
    """The last backward in which its gradient was released early."""

    @property
    def is_released(self) -> bool:
        """True if its gradient was released in the backward that runs now."""
        return self.last_backward == torch._C._current_graph_task_id()

    def refuse_second(self, gradient: Tensor | None) -> None:
        """Raise if a second gradient comes; autograd passes None if it has no gradient."""
        if gradient is not None and self.is_released:
            raise OrtAccelError(SECOND_GRADIENT.format(shape=tuple(gradient.shape)))


@dataclass(eq=False)
class _HookOnce:
    """A post-accumulate hook that skips the call at the end of a backward in which it was called early."""

    hook: Callable[[Tensor], None]
    state: _Parameter

    def __call__(self, parameter: Tensor) -> None:
        if not self.state.is_released:
            self.hook(parameter)


class GradientRelease:
    """Releases the gradients of one model's parameters."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._states: MutableMapping[Tensor, _Parameter] = WeakIdKeyDictionary()
        self._handles: list[RemovableHandle] = []

    def close(self) -> None:
        """Remove all hooks and forget all parameters; a later release begins anew."""
        self._states.clear()
        while self._handles:
            self._handles.pop().remove()

    def hand_over(self, gradients: list[Tensor], edges: Sequence[int], tensors: int) -> list[Tensor | None]:
        """Release gradients to their parameters and empty the list. Returns those that could not be released.

        `edges` has for each gradient the index of its tensor among the forward's inputs, whose number is `tensors`.
        """
        node = torch._C._current_autograd_node()
        targets = node.next_functions if node is not None and not torch.is_grad_enabled() else ()
        if len(targets) != tensors:  # the compiled graph runs inside another autograd node
            kept: list[Tensor | None] = [*gradients]
            gradients.clear()
            return kept
        return [self._release(targets[edge][0], gradients.pop(0)) for edge in edges]

    def _release(self, target: Node | None, gradient: Tensor) -> Tensor | None:
        """Returns the gradient if it cannot be released, otherwise None."""
        parameter = getattr(target, "variable", None)
        if target is None or parameter is None or not _is_alike(gradient, parameter) or not _accumulates(target):
            return gradient
        state, hooks = self._states.get(parameter), parameter._post_accumulate_grad_hooks
        if not hooks or len(parameter._backward_hooks or ()) > (state is not None):  # those may change the gradient
            return gradient
        state = state or self._register(parameter)
        state.refuse_second(gradient)
        _accumulate(parameter, gradient)
        del gradient  # so that its memory is free once a hook has used it
        for key in list(hooks):
            if key in hooks:  # an earlier hook may have removed it
                hook = hooks[key] = hooks[key] if isinstance(hooks[key], _HookOnce) else _HookOnce(hooks[key], state)
                hook(parameter)
        state.last_backward = torch._C._current_graph_task_id()
        return None

    def _register(self, parameter: Tensor) -> _Parameter:
        state = self._states[parameter] = _Parameter()
        self._handles.append(parameter.register_hook(state.refuse_second))  # type: ignore[no-untyped-call]
        self._report.applied(FEATURE, f"{len(self._states)} parameters get their gradients before the backward ends")
        return state


def _is_alike(gradient: Tensor, parameter: Tensor) -> bool:
    """True if autograd would accumulate the gradient without a conversion."""
    return (gradient.shape, gradient.dtype, gradient.device) == (parameter.shape, parameter.dtype, parameter.device)


def _accumulates(target: Node) -> bool:
    """True if this backward accumulates into the parameter; false in `torch.autograd.grad`."""
    try:
        return bool(torch._C._will_engine_execute_node(target))
    except RuntimeError:  # raised for leaves in `torch.autograd.grad`
        return False


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate as autograd does; a gradient with the parameter's strides keeps its memory."""
    if parameter.grad is not None:
        parameter.grad += gradient
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
