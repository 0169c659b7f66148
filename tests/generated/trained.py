"""A model that trains while its code is generated, each step beside eager mode's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ort_accel.generated.takeover import FEATURE, Generator
from tests.against_eager import assert_same, pair, report, step
from tests.generated.traced import normal
from tests.generated.watched import MANY, wait


class Model(nn.Module):
    """Chains of element-wise operators, which read and write a MiB each at 256 rows, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.drop = nn.Linear(32, width), nn.Linear(width, 4), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        inner = self.drop(inner.sin() * torch.sigmoid(inner) + inner.cos())
        return self.last(inner).tanh().square().mean()


def config(folder: Path | None = None, generated: Mapping[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    """Kernels are generated at once, for graphs whose sizes are all open."""
    engine = {"compare_with_eager": False, "dynamic_shapes": True, "cache_dir": folder and str(folder), **engine}
    return {"version": 1, "compute": {"generated": {"enabled": True, **(generated or {})}}, "engine": engine}


class Training:
    """Steps of a model, each compared with the same step in eager mode."""

    def __init__(
        self, settings: Any, model: nn.Module, batch: Callable[[int], Tensor] = lambda rows: normal(rows, 32)
    ) -> None:
        self.eager, self.ours = pair(model, settings)
        self.report = report(self.ours)
        self.steps, self._batch = 0, batch

    def __call__(self, *rows: int) -> None:
        for count in rows:
            self.steps += 1
            x = self._batch(count)
            assert_same(step(self.ours, x, seed=self.steps), step(self.eager, x, seed=self.steps))

    def until_decided(self, *rows: int) -> None:
        """Compiles the kernels of forward and backward, and trains until it is decided what goes on."""
        self(*rows)
        wait()
        self(*(rows[at % len(rows)] for at in range(MANY + 1)))

    @property
    def generator(self) -> Generator:
        found: Generator = self.ours._compiled_call_impl.backend.lowering.generator
        return found

    @property
    def feature(self) -> Any:
        return self.report.features[FEATURE]

    @property
    def said(self) -> list[str]:
        """The notes about kernels."""
        return [note for note in self.report.notes if "kernels" in note]


def choices(training: Training) -> dict[str, str]:
    """Returns what was chosen for the forward and the backward."""
    return {race.graph.split()[0]: race.chosen for race in training.report.races}
