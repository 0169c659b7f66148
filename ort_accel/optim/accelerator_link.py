"""A `MasterWeightOptimizer` in a loop that Accelerate drives, where `accelerator.backward` computes the gradients.

The only file that touches Accelerate: `accelerator.scaler`, which scales the loss, unscales gradients and takes steps,
and `accelerator.clip_grad_norm_`. Checked on accelerate 1.15.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ort_accel.errors import OptimizerError
from ort_accel.optim.master_weights import MasterWeightOptimizer


class _Scaler:
    """The part of `torch.amp.GradScaler` that Accelerate and Trainer call, by the optimizer's own loss scale."""

    def __init__(self, optimizer: MasterWeightOptimizer) -> None:
        self.optimizer = optimizer

    def scale(self, loss: Tensor) -> Tensor:
        return self.optimizer.scale(loss)

    def unscale_(self, _: Any) -> None:
        self.optimizer.unscale_()

    def step(self, optimizer: Any, closure: Any = None) -> Any:
        # Accelerate knows a skipped step by a `step` that was not called.
        if self.optimizer.unscale_():
            return optimizer.step(closure)
        return self.optimizer.skip()

    def update(self) -> None:
        """The scale has been updated by the step."""

    def get_scale(self) -> float:
        return self.optimizer.loss_scale.scale

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        """Empty: the scale is part of the optimizer's state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def connect(accelerator: Any, optimizer: MasterWeightOptimizer) -> None:
    """Let an Accelerator scale its losses, clip and step by this optimizer. Call it before `accelerator.prepare`."""
    if accelerator.scaler is not None and not isinstance(accelerator.scaler, _Scaler):
        raise OptimizerError(
            f"this Accelerator has a {type(accelerator.scaler).__name__} (mixed_precision="
            f"{accelerator.mixed_precision!r}), and the loss would be scaled twice; use mixed_precision 'no' or "
            "'bf16', or leave the optimizer without FP16_Optimizer"
        )

    def clip_grad_norm_(_: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip all gradients of the optimizer, on its fp32 copies, whichever of its parameters are named."""
        return optimizer.clip_grad_norm_(max_norm, norm_type)

    accelerator.scaler = _Scaler(optimizer)
    accelerator.clip_grad_norm_ = clip_grad_norm_
