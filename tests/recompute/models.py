"""Small models with dropout, their steps, and comparisons of steps."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import nn

import ort_accel
from ort_accel.cli.benchmark.workload import Batch, Workload, batch_of, build
from ort_accel.reporting.memory import GraphMemory
from tests.against_eager import Trace, step

NAMES = ("bert", "gpt2", "llama", "t5")

OWN_SEGMENTS = {"placement": "fixed"}
ALL_ROWS = {"density": {"labels": False, "padding": False}, "compute": {"upstream": False, **OWN_SEGMENTS}}
"""Settings with which BERT computes rows that its classifier does not read. Other models compute all rows."""

ALIKE = {"observe": {"log_level": "error"}, "compute": OWN_SEGMENTS}
"""Fixed placement and PyTorch's own segments, as under settings that save memory: bits and bytes can be compared."""


def size(name: str, rows: int, layers: int = 2) -> Workload:
    return Workload(name, hidden=32, layers=layers, heads=2, batch=rows, length=16, vocab=64, dropout=0.1)


@cache
def model_and_batch(name: str, rows: int = 2, layers: int = 2) -> tuple[nn.Module, Batch]:
    return build(size(name, rows, layers)), batch_of(size(name, rows, layers))


def accelerated(name: str, memory: dict[str, Any], layers: int = 2, **config: Any) -> nn.Module:
    return ort_accel.accelerate(
        copy.deepcopy(model_and_batch(name, layers=layers)[0]), ALIKE | config | {"memory": memory}
    )


def recorded(model: nn.Module) -> GraphMemory:
    """Return the record of the graph that was compiled last."""
    return list(ort_accel.report(model).memory.values())[-1]


def one_step(
    name: str, memory: dict[str, Any], rows: int = 2, layers: int = 2, **config: Any
) -> tuple[Trace, GraphMemory]:
    """Run a step with these memory settings, and return it with its record."""
    model = accelerated(name, memory, layers, **config)
    trace = step(model, **model_and_batch(name, rows, layers)[1])
    return trace, recorded(model)


@cache
def plain(name: str, all_rows: bool = False, rows: int = 2, layers: int = 2) -> tuple[Trace, GraphMemory]:
    """Run the step without recompute."""
    return one_step(name, {"level": 0}, rows, layers, **(ALL_ROWS if all_rows else {}))


def assert_same_bits(one: Trace, other: Trace) -> None:
    assert torch.equal(one.loss, other.loss)
    assert torch.equal(one.random, other.random), "other random numbers were drawn"
    for name, gradient in other.gradients.items():
        assert gradient is None or torch.equal(one.gradients[name], gradient), name
