"""Optimizers and 16-bit training. Needs PyTorch only."""

from ort_accel.optim.accelerator_link import connect
from ort_accel.optim.adam_update import AdamWMode
from ort_accel.optim.decay import decay_groups
from ort_accel.optim.factory import build_optimizer
from ort_accel.optim.fp16_optimizer import FP16_Optimizer
from ort_accel.optim.fused_adam import FusedAdam
from ort_accel.optim.in_backward import StepInBackward, step_in_backward
from ort_accel.optim.loss_scale import LossScale
from ort_accel.optim.master_weights import MasterWeightOptimizer

__all__ = [
    "AdamWMode",
    "FP16_Optimizer",
    "FusedAdam",
    "LossScale",
    "MasterWeightOptimizer",
    "StepInBackward",
    "build_optimizer",
    "connect",
    "decay_groups",
    "step_in_backward",
]
