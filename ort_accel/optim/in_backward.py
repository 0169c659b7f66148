"""Updating each parameter as soon as its gradient exists, so that gradients never exist all at once."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from ort_accel.errors import OptimizerError
from ort_accel.optim.fused_adam import FusedAdam


class StepInBackward:
    """An optimizer that works within the backward; `remove` makes it wait for `step` again."""

    def __init__(self, optimizer: FusedAdam) -> None:
        self._handles: list[Any] = []
        for position, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                hook = partial(_update, optimizer, position)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Let the optimizer wait for `step` again."""
        while self._handles:
            self._handles.pop().remove()


def step_in_backward(optimizer: TorchOptimizer) -> StepInBackward:
    """Let a FusedAdam update each parameter within `backward`, and free its gradient: `step_in_backward(optimizer)`.

    `step` and `zero_grad` then find nothing to do, and may still be called. Each backward is one step: gradients are
    neither accumulated over several nor clipped by their norm nor scaled, and other processes are not waited for.
    """
    if not isinstance(optimizer, FusedAdam):
        raise OptimizerError(
            f"only FusedAdam can update parameters within the backward, and this is {type(optimizer).__name__}; build "
            "one with ort_accel.optim.FusedAdam, without fp32 weights around it"
        )
    return StepInBackward(optimizer)


def _update(optimizer: FusedAdam, position: int, param: Tensor) -> None:
    optimizer.step_one(param, optimizer.param_groups[position])  # read anew: loading a state replaces the groups
