"""One file a section of the YAML, of the section's name."""

from ort_accel.config.sections.compute import Compute, Generated, Tuning
from ort_accel.config.sections.data import Data, Packing
from ort_accel.config.sections.density import Density
from ort_accel.config.sections.distributed import Distributed, LoadBalancing
from ort_accel.config.sections.engine import Engine
from ort_accel.config.sections.memory import Memory
from ort_accel.config.sections.observe import ActivationStatistics, Observe
from ort_accel.config.sections.optimizer import Fp16, Optimizer
from ort_accel.config.sections.precision import CastPropagation, Precision

__all__ = [
    "ActivationStatistics",
    "CastPropagation",
    "Compute",
    "Data",
    "Density",
    "Distributed",
    "Engine",
    "Fp16",
    "Generated",
    "LoadBalancing",
    "Memory",
    "Observe",
    "Optimizer",
    "Packing",
    "Precision",
    "Tuning",
]
