"""Construction of the optimizer that the `optimizer:` section of a configuration describes."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from ort_accel.config.sections import Optimizer
from ort_accel.errors import OptimizerError
from ort_accel.optim.adam_update import AdamWMode
from ort_accel.optim.decay import decay_groups
from ort_accel.optim.fp16_optimizer import FP16_Optimizer
from ort_accel.optim.fused_adam import FusedAdam
from ort_accel.optim.loss_scale import LossScale
from ort_accel.optim.master_weights import MasterWeightOptimizer

MODES = {
    "adam_l2": AdamWMode.ADAM_L2_REGULARIZATION,
    "adamw_hf": AdamWMode.ADAMW_TRANSFORMERS,
    "adamw_torch": AdamWMode.ADAMW_TORCH,
}
"""The update rules by their names in `optimizer.mode`."""


def build_optimizer(
    model: nn.Module,
    config: Optimizer,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> TorchOptimizer:
    """Returns the optimizer that a configuration asks for: `build_optimizer(model, config.optimizer, lr=1e-4)`.

    Biases and norms do not decay. With `fp16.enabled` the optimizer keeps fp32 weights and scales the loss: call its
    `backward`.
    """
    if config.name is None:
        raise OptimizerError("optimizer.name is null, so there is nothing to build; write adamw_ort_fused there")
    groups = decay_groups(model, weight_decay)
    optimizer: TorchOptimizer = FusedAdam(groups, lr=lr, betas=betas, eps=eps, adam_w_mode=MODES[config.mode])
    return with_fp32_weights(optimizer, config) if config.fp16.enabled else optimizer


def with_fp32_weights(optimizer: TorchOptimizer, config: Optimizer) -> MasterWeightOptimizer:
    """Returns the optimizer with fp32 weights and the loss scale of the configuration around it."""
    wrapped: MasterWeightOptimizer = FP16_Optimizer(optimizer, loss_scale=LossScale.from_config(config.fp16))
    return wrapped
