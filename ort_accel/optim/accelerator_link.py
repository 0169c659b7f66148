"""The connection of a `MasterWeightOptimizer` to an Accelerator, whose `backward` computes the gradients.

This is the only file of the room that touches Accelerate: `accelerator.scaler`, which scales the loss, unscales
gradients and takes steps, `accelerator.clip_grad_norm_` and `clip_grad_value_`. Checked on accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from ort_accel.errors import OptimizerError
from ort_accel.optim.master_weights import MasterWeightOptimizer


class _Scaler:
    """The methods of `torch.amp.GradScaler` that Accelerate and Trainer call, on the optimizer's own loss scale."""

    def __init__(self, optimizer: MasterWeightOptimizer) -> None:
        self.optimizer = optimizer

    def scale(self, loss: Tensor) -> Tensor:
        return self.optimizer.scale(loss)

    def unscale_(self, _: object) -> None:
        self.optimizer.unscale_()

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        # Accelerate detects a skipped step by the call of `step` that is missing.
        if self.optimizer.unscale_():
            return optimizer.step() if closure is None else optimizer.step(closure)
        self.optimizer.skip()
        return None

    def update(self) -> None:
        """Do nothing: the step has updated the scale."""

    def get_scale(self) -> float:
        return self.optimizer.loss_scale.scale

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> StateDict:
        """Returns nothing: the scale is part of the optimizer's state."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Do nothing."""


def connect(accelerator: Any, optimizer: MasterWeightOptimizer) -> None:
    """Let an Accelerator scale losses, clip and step with this optimizer. Call it before `accelerator.prepare`."""
    if accelerator.scaler is not None and not isinstance(accelerator.scaler, _Scaler):
        raise OptimizerError(
            f"this Accelerator has a {type(accelerator.scaler).__name__} (mixed_precision="
            f"{accelerator.mixed_precision!r}), and the loss would be scaled twice; use mixed_precision 'no' or "
            "'bf16', or leave the optimizer without FP16_Optimizer"
        )

    def clip_grad_norm_(_: object, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all fp32 copies, whichever parameters are given."""
        return optimizer.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(_: object, clip_value: float) -> None:
        """Clip each gradient of all fp32 copies, whichever parameters are given."""
        optimizer.clip_grad_value_(clip_value)

    accelerator.scaler = _Scaler(optimizer)
    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.clip_grad_value_ = clip_grad_value_
