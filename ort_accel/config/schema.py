"""The configuration as one typed, immutable object. YAML, command line and Python all build this."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ort_accel.config.declaration import NO_ROW
from ort_accel.config.sections import Compute, Data, Density, Distributed, Engine, Memory, Observe, Optimizer, Precision
from ort_accel.config.values import EXACT, Section


class Config(Section):
    """Everything that can be set. Each field has a default, so an empty `Config()` is a good start."""

    version: Annotated[Literal[1], EXACT, NO_ROW] = 1
    """The version of this format."""

    engine: Engine = Engine()
    precision: Precision = Precision()
    compute: Compute = Compute()
    memory: Memory = Memory()
    data: Data = Data()
    density: Density = Density()
    optimizer: Optimizer = Optimizer()
    distributed: Distributed = Distributed()
    observe: Observe = Observe()

    def to_dict(self) -> dict[str, Any]:
        """Returns every key with its value, as plain data."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Returns a YAML file that `load_config` reads back into an equal object."""
        from ort_accel.config.yaml_writer import to_yaml

        return to_yaml(self.to_dict())
