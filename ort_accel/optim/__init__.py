"""Optimizers and 16-bit training. Needs PyTorch only, no ONNX Runtime."""

from ort_accel.optim.adam_update import AdamWMode
from ort_accel.optim.fp16_optimizer import FP16_Optimizer
from ort_accel.optim.fused_adam import FusedAdam
from ort_accel.optim.loss_scale import LossScale

__all__ = ["AdamWMode", "FP16_Optimizer", "FusedAdam", "LossScale"]
