"""Models under DeepSpeed ZeRO stage 3 on the engine: each layer is gathered as a whole around its own graph."""

from ort_accel.zero3.activate import accelerate_partitioned
from ort_accel.zero3.deepspeed_interfaces import is_partitioned, live_parameters, zero_optimizer_in

__all__ = ["accelerate_partitioned", "is_partitioned", "live_parameters", "zero_optimizer_in"]
