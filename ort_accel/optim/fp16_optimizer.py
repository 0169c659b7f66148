"""FP16_Optimizer: the one name for 16-bit training, around any optimizer or on one that a framework made."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ort_accel.errors import OptimizerError
from ort_accel.optim.loss_scale import LossScale
from ort_accel.optim.master_weights import MasterWeightOptimizer


def FP16_Optimizer(optimizer: Any, *, loss_scale: LossScale | None = None) -> Any:
    """Prepare an optimizer for 16-bit training."""
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"FP16_Optimizer takes a torch.optim.Optimizer or one that DeepSpeed, Apex or Megatron made, "
            f"not a {type(optimizer).__name__}"
        )
    return MasterWeightOptimizer(optimizer, loss_scale)
