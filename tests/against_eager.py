"""Comparing an accelerated model with the same model in eager mode, in the same run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import ort_accel
from ort_accel.reporting.fallbacks import Fallback, Reason
from ort_accel.reporting.report import Report

RTOL, ATOL = 1e-4, 1e-5

Batch = Mapping[str, Any]


BETWEEN_SESSIONS = {"compute": {"native": False}}
"""PyTorch runs what ONNX Runtime does not, between its sessions."""


def pair(model: nn.Module, config: Any = None) -> tuple[nn.Module, nn.Module]:
    """A model in eager mode, and a copy of it on the engine."""
    return model, ort_accel.accelerate(copy.deepcopy(model), config)


def first_tensor(outputs: Any) -> torch.Tensor:
    """The loss: what a model gives first."""
    return next(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss of a model that computes one, or a weighted sum where it does not."""
    loss = outputs.loss if hasattr(outputs, "loss") else first_tensor(outputs)
    return loss if loss.ndim == 0 else (loss * torch.linspace(-1, 1, loss.numel()).view_as(loss)).sum()


@dataclass(frozen=True)
class Trace:
    """What one step gave."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    random: torch.Tensor
    """The state of the random number generator behind the step."""


def step(
    model: nn.Module, *args: Any, seed: int = 0, loss: Callable[[Any], torch.Tensor] = loss_of, **kwargs: Any
) -> Trace:
    """Forward and backward from a seed."""
    model.zero_grad()
    torch.manual_seed(seed)
    value = loss(model(*args, **kwargs))
    value.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Trace(
        value.detach(), {n: None if g is None else g.clone() for n, g in gradients.items()}, torch.get_rng_state()
    )


def assert_same(ours: Trace, eager: Trace, rtol: float = RTOL, atol: float = ATOL) -> None:
    """Loss, every gradient, and the random numbers used."""
    torch.testing.assert_close(ours.loss, eager.loss, rtol=rtol, atol=atol)
    for name, gradient in eager.gradients.items():
        torch.testing.assert_close(
            ours.gradients[name], gradient, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert torch.equal(ours.random, eager.random), "other random numbers were drawn"


def assert_step_as_eager(eager: nn.Module, ours: nn.Module, *args: Any, **kwargs: Any) -> None:
    """One step of both, from the same seed; what is compared was compiled."""
    assert_same(step(ours, *args, **kwargs), step(eager, *args, **kwargs))
    assert not not_compiled(ours)


def compilations(model: nn.Module) -> int:
    """How many graphs the engine compiled for a model so far."""
    return report(model).counters["compilations"]


def assert_two_graphs_each_way(compiled: list[int]) -> None:
    """After each of four sizes: one graph with fixed sizes, one with open ones, and then no more.

    Before torch 2.13 Dynamo may know from another model that sizes change in the same code: then there is an open one
    alone.
    """
    at_once = [[2, 2, 2, 2]] if torch.__version__ < (2, 13) else []
    assert compiled in [[2, 4, 4, 4], *at_once]


def not_compiled(model: nn.Module) -> list[Fallback]:
    """What runs in PyTorch since a compiler failed on it."""
    return [item for item in report(model).fallbacks if item.reason is Reason.NOT_COMPILED]


def report(model: nn.Module) -> Report:
    """The engine's report of a model."""
    return ort_accel.report(model)
