"""`FP16_Optimizer`, which prepares any optimizer for 16-bit training."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ort_accel.errors import OptimizerError
from ort_accel.optim.loss_scale import LossScale
from ort_accel.optim.master_weights import MasterWeightOptimizer
from ort_accel.optim.modifiers import maker_of, replace_checks


def FP16_Optimizer(optimizer: Any, *, loss_scale: LossScale | None = None) -> Any:
    """Prepare an optimizer for 16-bit training.

    A PyTorch optimizer is returned inside a `MasterWeightOptimizer`, with fp32 weights and a dynamic loss scale. An
    optimizer of DeepSpeed, Apex or Megatron, also inside Accelerate's wrapper, is returned itself, with its slow
    overflow checks and norms replaced. Raises with the reason if none could be replaced.
    """
    if isinstance(optimizer, MasterWeightOptimizer):
        raise OptimizerError("this optimizer has fp32 weights and a loss scale already; leave FP16_Optimizer out")
    maker = maker_of(optimizer)
    if maker is not None and loss_scale is not None:
        raise OptimizerError(f"{maker} scales the loss itself; leave loss_scale out")
    if (replaced := replace_checks(optimizer)) is not None:
        if not replaced.methods:
            raise OptimizerError(
                f"nothing was replaced in the optimizer that {replaced.maker} made: {'; '.join(replaced.refusals)}; "
                "use it as it is"
            )
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            "FP16_Optimizer takes a torch.optim.Optimizer or one that DeepSpeed, Apex or Megatron made, "
            f"not a {type(optimizer).__name__}"
        )
    return MasterWeightOptimizer(optimizer, loss_scale)
