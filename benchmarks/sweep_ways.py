"""The ways in which the sweep of models runs each of them, and how close to eager mode it must come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.sweep_tasks import Batch

RTOL, ATOL = 1e-3, 1e-5
NOISE, OF_IT, OF_ALL = 2.0, 2.0**-4, 2.0**-10
"""How far a value in a smaller type may be from single precision: so many times as far as eager mode, and so much of
its size (a few numbers near zero fall on the other side of a ReLU) and of the largest gradient's (a key's bias has a
gradient of zero and rounding)."""

Step = dict[str, torch.Tensor | None]
"""What a step gives, by name."""


def trained(model: nn.Module, batch: Batch, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> Step:
    """The loss and every gradient, of a step from a fixed seed."""
    model.zero_grad()
    torch.manual_seed(7)
    with around():
        outputs = model(**batch)
    loss = outputs.loss if hasattr(outputs, "loss") else outputs[0]
    loss.backward()
    gradients = {name: None if item.grad is None else item.grad.clone() for name, item in model.named_parameters()}
    return {"the loss": loss.detach(), **gradients}


def inferred(model: nn.Module, batch: Batch) -> Step:
    """Every output, without gradients and dropout."""
    torch.manual_seed(7)
    with torch.no_grad():
        outputs = model.eval()(**batch)
    return {
        pytree.keystr(path): item.clone()
        for path, item in pytree.tree_flatten_with_path(dict(outputs))[0]
        if isinstance(item, torch.Tensor)
    }


def _as_is(_: nn.Module) -> None:
    """The model as it is made."""


def _checkpoint(model: nn.Module) -> None:
    model.gradient_checkpointing_enable()


def _freeze(model: nn.Module) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)


def _halve(model: nn.Module) -> None:
    model.bfloat16()


@dataclass(frozen=True)
class Way:
    """What is done with a model and its copy on the engine."""

    about: str
    prepare: Callable[[nn.Module], None] = _as_is
    step: Callable[[nn.Module, Batch], Step] = trained
    settings: dict[str, Any] = field(default_factory=dict)
    """Of ort_accel, by section."""
    is_rough: bool = False
    """Whether in the smaller type, so that eager mode's own distance from single precision is the measure."""


WAYS = {
    "usual": Way("a training step"),
    "checkpointing": Way("with the model's own gradient checkpointing", _checkpoint),
    "frozen": Way("every other parameter frozen", _freeze),
    "autocast": Way(
        "under bfloat16 autocast",
        step=partial(trained, around=partial(torch.autocast, "cpu", torch.bfloat16)),
        is_rough=True,
    ),
    "bfloat16": Way("a model of bfloat16", _halve, is_rough=True),
    "recomputing": Way("`memory.level: 1`", settings={"memory": {"level": 1}}),
    "inference": Way(
        "without gradients, all outputs", step=inferred, settings={"engine": {"compile_evaluation": True}}
    ),
}


def difference(found: Step, expected: Step) -> str:
    """What differs; nothing if the two agree within rounding."""
    for name, value in expected.items():
        other = found.get(name)
        if (value is None) != (other is None):
            return f"{name} has {'no' if other is None else 'a'} value"
        if value is not None and (text := _differs(other, value)):
            return f"{name}: {text}"
    return ""


def _differs(found: Any, expected: torch.Tensor) -> str:
    """How two tensors differ beyond the tolerance, measured at the largest number in them."""
    scale = expected.abs().max().item() if expected.numel() else 0.0
    try:
        torch.testing.assert_close(found, expected, rtol=RTOL, atol=max(ATOL, RTOL * scale), equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def rough_difference(found: Step, eager: Step, exact: Step) -> str:
    """What is further from single precision than twice as far as eager mode in the smaller type; nothing if none is."""
    largest = max(value.norm().item() for value in exact.values() if value is not None)
    for name, value in exact.items():
        ours, theirs = found.get(name), eager.get(name)
        if (ours is None) != (theirs is None):
            return f"{name} has {'no' if ours is None else 'a'} value"
        if ours is None or theirs is None or value is None:
            continue
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return f"{name}: {ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
        size = value.norm().item()
        off, usual = (item.to(value.dtype).sub(value).norm().item() for item in (ours, theirs))
        if not off <= NOISE * usual + OF_IT * size + OF_ALL * largest:
            return f"{name}: {off:.3g} away from single precision, eager mode {usual:.3g}, of {size:.3g}"
    return ""
