"""The configuration as one typed, immutable object. YAML, command line and Python all build this."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ort_accel.config.sections import Compute, Density, Distributed, Engine, Memory, Observe, Optimizer, Precision
from ort_accel.config.values import EXACT, Section


class Config(Section):
    """Everything that can be set. Each field has a default, so an empty `Config()` is a good start."""

    version: Annotated[Literal[1], EXACT] = 1
    """The version of this format."""

    engine: Engine = Engine()
    """Which ONNX Runtime runs the model, and what happens where it cannot."""

    precision: Precision = Precision()
    """What happens to casts under autocast."""

    compute: Compute = Compute()
    """Doing less work, and doing the rest with the fastest kernel."""

    memory: Memory = Memory()
    """What the forward keeps for the backward, and what is computed again."""

    density: Density = Density()
    """Not computing what padding and ignored labels make useless."""

    optimizer: Optimizer = Optimizer()
    """Which optimizer the Trainer builds, and 16-bit training."""

    distributed: Distributed = Distributed()
    """More than one process."""

    observe: Observe = Observe()
    """What is logged, measured and written down."""

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as plain data."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """A YAML file that `load_config` reads back into an equal object."""
        from ort_accel.config.yaml_writer import to_yaml

        return to_yaml(self.to_dict())
