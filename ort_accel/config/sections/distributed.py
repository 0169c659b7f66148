"""`distributed:` more than one process."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.declaration import NO_ROW, Row
from ort_accel.config.values import Section, Switch
from ort_accel.reporting.report import State


class LoadBalancing(Section):
    """Dealing samples so that every process has about the same work in each step."""

    enabled: Annotated[
        bool,
        Row(
            "ORTTrainer does it; in a loop of your own use ort_accel.data.LoadBalancingDistributedSampler",
            State.REFUSED,
        ),
    ] = False
    """Use the load-balancing sampler in place of the Trainer's distributed sampler."""

    complexity: Annotated[Literal["length"], NO_ROW] = "length"
    """The cost of a sample: its number of tokens. From Python, `LoadBalancingDistributedSampler` takes any function."""

    group_size: Annotated[Annotated[int, Field(ge=1)] | None, NO_ROW] = None
    """Sort by cost within groups of so many samples instead of over the whole dataset, which keeps more randomness."""

    random_level: Annotated[float, Field(ge=0.0, le=1.0), NO_ROW] = 0.0
    """The noise that is added to the cost before sorting: 0 balances best, 1 is close to random order."""

    seed: Annotated[int, Field(ge=0), NO_ROW] = 0
    """The seed of the shuffling; the same on every process."""

    drop_last: Annotated[bool, NO_ROW] = False
    """Drop the samples that do not fill a step on all processes, instead of repeating some."""


class Distributed(Section):
    """More than one process."""

    zero3: Switch = "auto"
    """Run a model under DeepSpeed ZeRO stage 3 layer by layer, gathering and releasing each layer's parameters. `auto`
    does so when the model is partitioned; `true` makes an unpartitioned model an error; `false` leaves such a model to
    DeepSpeed and PyTorch."""

    load_balancing: LoadBalancing = LoadBalancing()
