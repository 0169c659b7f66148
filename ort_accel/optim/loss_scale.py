"""The dynamic scale of the loss in 16-bit training: the largest at which gradients do not overflow."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch.optim.optimizer import StateDict

from ort_accel.config.sections import Fp16
from ort_accel.errors import OptimizerError

_MAX_SCALE = float(torch.finfo(torch.float32).max)


@dataclass
class LossScale:
    """A dynamic loss scale. `optimizer.fp16` in the configuration has the same settings."""

    scale: float = 65536.0
    """The current factor of the loss."""
    growth_factor: float = 2.0
    """The factor of the scale after `window` steps in a row without overflow."""
    backoff_factor: float = 0.5
    """The factor of the scale at overflow number `hysteresis` in a row, and at each overflow that directly follows."""
    window: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    """The smallest scale."""
    good_steps: int = 0
    """The number of steps without overflow since the scale changed or a step overflowed."""
    overflows: int = 0
    """The number of overflows in a row."""

    def __post_init__(self) -> None:
        problems = {
            "scale": (self.scale > 0 and math.isfinite(self.scale), "a finite number above 0"),
            "growth_factor": (self.growth_factor > 1, "above 1"),
            "backoff_factor": (0 < self.backoff_factor < 1, "between 0 and 1"),
            "window": (self.window >= 1, "1 or more"),
            "hysteresis": (self.hysteresis >= 1, "1 or more"),
            "min_scale": (0 < self.min_scale <= self.scale, f"above 0 and at most the first scale, {self.scale:g}"),
        }
        for name, (is_right, allowed) in problems.items():
            if not is_right:
                raise OptimizerError(f"{name} of a loss scale is {getattr(self, name)}; it must be {allowed}")

    @classmethod
    def from_config(cls, fp16: Fp16) -> LossScale:
        """Returns the loss scale that the configuration asks for."""
        return cls(
            fp16.initial_scale,
            fp16.growth_factor,
            fp16.backoff_factor,
            fp16.window,
            fp16.hysteresis,
            fp16.min_scale,
        )

    def update(self, overflow: bool) -> None:
        """Count a step, and change the scale if it is due."""
        if overflow:
            self.good_steps = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.overflows = 0
        self.good_steps += 1
        if self.good_steps >= self.window:  # more after a state with a larger window
            self.good_steps = 0
            if self.scale * self.growth_factor <= _MAX_SCALE:
                self.scale *= self.growth_factor

    def state_dict(self) -> StateDict:
        """Returns everything that the next step depends on."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from a state; the settings of this object stay."""
        for name in ("scale", "good_steps", "overflows"):
            setattr(self, name, state[name])
