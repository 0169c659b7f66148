"""Updates of each parameter as soon as its gradient exists, so that not all gradients exist at once."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.hooks import RemovableHandle

from ort_accel.errors import OptimizerError
from ort_accel.optim.fused_adam import FusedAdam


class StepInBackward:
    """The hooks by which an optimizer updates parameters within the backward."""

    def __init__(self, optimizer: FusedAdam) -> None:
        self._handles: list[RemovableHandle] = []
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                hook = partial(_update, optimizer, index)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Remove the hooks: the optimizer updates parameters in `step` again."""
        while self._handles:
            self._handles.pop().remove()


def step_in_backward(optimizer: TorchOptimizer) -> StepInBackward:
    """Let a FusedAdam update each parameter within `backward` and free its gradient.

    `step` and `zero_grad` have nothing left to do, and may still be called. Each backward is one step: gradients are
    not accumulated, clipped by their norm, scaled, or averaged with other processes.
    """
    if not isinstance(optimizer, FusedAdam):
        raise OptimizerError(
            f"only FusedAdam can update parameters within the backward, and this is {type(optimizer).__name__}; build "
            "one with ort_accel.optim.FusedAdam, without fp32 weights around it"
        )
    return StepInBackward(optimizer)


def _update(optimizer: FusedAdam, index: int, param: Tensor) -> None:
    optimizer.step_one(param, optimizer.param_groups[index])  # by index, since loading a state replaces the groups
