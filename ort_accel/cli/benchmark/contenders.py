"""The ways to run a step, and whether each gives eager's loss and gradients."""

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
"""The engine without its rewrites: padding and ignored labels are computed."""
CONTENDERS = (EAGER, INDUCTOR, ORT_ACCEL)

FP32_TOLERANCE = 1e-4
"""How far a gradient may be from eager's, as a share of its length."""
BF16_TOLERANCE = 3
"""How many times farther from the fp32 gradients than eager's own bf16 gradients others may be."""
_SMALL = 1e-3
"""Gradients shorter than this share of the longest are compared as if they were so long: they may be all rounding."""


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
    """Forward and backward, from a seed; the gradients are left in the parameters. Returns the loss."""
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(**batch).loss
    loss.backward()
    return float(loss.detach())


def forget_gradients(model: nn.Module) -> None:
    """Free the gradients of the last step."""
    model.zero_grad(set_to_none=True)


def next_step(model: nn.Module, batches: Iterator[Batch], precision: str) -> None:
    """A step on the next batch, without the gradients of the last one."""
    forget_gradients(model)
    step(model, next(batches), precision)


@dataclass(frozen=True)
class Trace:
    """What one step gave."""

    loss: float
    gradients: dict[str, torch.Tensor]


def trace(model: nn.Module, batch: Batch, precision: str) -> Trace:
    """One step, and what it gave."""
    forget_gradients(model)
    loss = step(model, batch, precision)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = {name: gradient.clone() for name, gradient in found.items() if gradient is not None}
    forget_gradients(model)
    return Trace(loss, gradients)


def distances(one: Trace, other: Trace) -> dict[str, float]:
    """How far each value is from the other step's, as a share of its length."""
    longest = max((float(gradient.norm()) for gradient in other.gradients.values()), default=0.0)
    found = {"the loss": abs(one.loss - other.loss) / max(abs(other.loss), _SMALL)}
    for name, gradient in other.gradients.items():
        if name not in one.gradients:
            return {f"the gradient of {name}": float("inf")}
        length = max(float(gradient.norm()), _SMALL * longest)
        found[f"the gradient of {name}"] = float((one.gradients[name] - gradient).norm()) / length
    return found


class Judge:
    """Knows what a step should give: what one of two steps in eager mode gave. Where a router finds two experts about
    equally good, it takes the one or the other as the last bits of a product fall, which change with the memory."""

    def __init__(self, model: nn.Module, batch: Batch, precision: str) -> None:
        self._batch, self._precision = batch, precision
        self._right = [trace(model, batch, "fp32") for _ in range(2)]
        self.allowed = FP32_TOLERANCE
        if precision == "bf16":
            own = distances(trace(model, batch, precision), self._right[0])
            self.allowed = BF16_TOLERANCE * max(own.values())

    def fault(self, model: nn.Module) -> str:
        """What is wrong with the step of a model; empty if nothing is."""
        made = trace(model, self._batch, self._precision)
        each = [distances(made, right) for right in self._right]
        found = min(each, key=lambda found: max(map(_comparable, found.values())))
        worst = max(found, key=lambda name: _comparable(found[name]))
        if found[worst] <= self.allowed:
            return ""
        return f"{worst} is off by {found[worst]:.2g} of its length, {self.allowed:.2g} is allowed"


def _comparable(distance: float) -> float:
    return float("inf") if distance != distance else distance
