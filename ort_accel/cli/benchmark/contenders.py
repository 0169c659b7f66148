"""Contenders that run a step, and the check that each gives eager's loss and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

import ort_accel
from ort_accel.cli.benchmark.workload import Batch
from ort_accel.cli.quiet import quiet
from ort_accel.config import Config, load_config

EAGER, INDUCTOR, ORT_ACCEL = "eager", "inductor", "ort_accel"
EVERYTHING = "ort_accel, computing everything"
"""The name of the engine without row skipping: it computes padding and ignored labels."""
CONTENDERS = (EAGER, INDUCTOR, ORT_ACCEL)

FP32_TOLERANCE = 1e-4
"""The largest distance of a gradient from eager's, as a share of its norm."""
BF16_TOLERANCE = 3
"""The largest distance from the fp32 gradients, in multiples of the distance of eager's bf16 gradients."""
_MIN_NORM_SHARE = 1e-3
"""The smallest norm that distances are divided by, as a share of the largest: smaller gradients may be all rounding."""


def prepare(name: str, model: nn.Module, config: Config) -> None:
    """Let a model run as the contender does, in place."""
    if name == INDUCTOR:
        model.compile()
    elif name == ORT_ACCEL:
        ort_accel.accelerate(model, quiet(config))
    elif name == EVERYTHING:
        ort_accel.accelerate(model, quiet(_computing_everything(config)))


def _computing_everything(config: Config) -> Config:
    tree = config.to_dict()
    return load_config(
        {
            **tree,
            "density": {**tree["density"], "labels": False, "padding": False},
            "compute": {**tree["compute"], "upstream": False},
        }
    )


def step(model: nn.Module, batch: Batch, precision: str, seed: int = 0) -> float:
    """Run forward and backward from a seed, leave the gradients in the parameters, and return the loss."""
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(**batch).loss
    loss.backward()
    return float(loss.detach())


def forget_gradients(model: nn.Module) -> None:
    """Free the gradients of the last step."""
    model.zero_grad(set_to_none=True)


def next_step(model: nn.Module, batches: Iterator[Batch], precision: str) -> None:
    """Run a step on the next batch, without the gradients of the last one."""
    forget_gradients(model)
    step(model, next(batches), precision)


@dataclass(frozen=True)
class Trace:
    """The loss and the gradients of one step."""

    loss: float
    gradients: dict[str, torch.Tensor]


def trace(model: nn.Module, batch: Batch, precision: str) -> Trace:
    """Run one step, and return its loss and gradients."""
    forget_gradients(model)
    loss = step(model, batch, precision)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = {name: gradient.clone() for name, gradient in found.items() if gradient is not None}
    forget_gradients(model)
    return Trace(loss, gradients)


def distances(one: Trace, other: Trace) -> dict[str, float]:
    """Returns the distance of each value from the other step's, as a share of its norm."""
    longest = max((float(gradient.norm()) for gradient in other.gradients.values()), default=0.0)
    found = {"the loss": abs(one.loss - other.loss) / max(abs(other.loss), _MIN_NORM_SHARE)}
    for name, gradient in other.gradients.items():
        if name not in one.gradients:
            return {f"the gradient of {name}": float("inf")}
        length = max(float(gradient.norm()), _MIN_NORM_SHARE * longest)
        found[f"the gradient of {name}"] = float((one.gradients[name] - gradient).norm()) / length
    return found


class Judge:
    """Compares steps with two steps in eager mode; a step that matches one of them is right.

    Two, because a router may choose either of two experts by the last bits of a product. Those change with memory.
    """

    def __init__(self, model: nn.Module, batch: Batch, precision: str) -> None:
        self._batch, self._precision = batch, precision
        self._right = [trace(model, batch, "fp32") for _ in range(2)]
        self.allowed = FP32_TOLERANCE
        if precision == "bf16":
            own = distances(trace(model, batch, precision), self._right[0])
            self.allowed = BF16_TOLERANCE * max(own.values())

    def fault(self, model: nn.Module) -> str:
        """Returns the fault of a model's step; empty if there is none."""
        made = trace(model, self._batch, self._precision)
        each = [distances(made, right) for right in self._right]
        found = min(each, key=lambda found: max(map(_comparable, found.values())))
        worst = max(found, key=lambda name: _comparable(found[name]))
        if found[worst] <= self.allowed:
            return ""
        return f"{worst} is off by {found[worst]:.2g} of its length, {self.allowed:.2g} is allowed"


def _comparable(distance: float) -> float:
    return float("inf") if distance != distance else distance
