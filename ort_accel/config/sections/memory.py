"""`memory:` values that the forward keeps for the backward, and values that are recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.declaration import NO_ROW, Constraint, Row, conflict, cuda_only
from ort_accel.config.plan_text import PlanError, read_plan_file
from ort_accel.config.values import EXACT, Budget, FilePath, Plans, Section, Switch
from ort_accel.reporting.report import State

_PROBE = "1:0"
_FOLLOWS_NO_PLANS = "memory.level {1} decides alone and follows no plans; write level 0, or remove the "


def _recomputes_layers(level: object) -> bool:
    return level in (1, 2)


def _unreadable_plans(file: Path | None) -> str | None:
    try:
        if file is not None:
            read_plan_file(file)
    except PlanError as error:
        return str(error)
    return None


class Memory(Section):
    """Values that the forward keeps for the backward, and values that are recomputed."""

    level: Annotated[Literal["auto", 0, 1, 2], EXACT] = "auto"
    """The amount of recomputation. 0 follows `plans` only. 1 recomputes everything within each transformer layer and
    keeps the layers' inputs. 2 also keeps smaller-typed copies where a cast was there. `auto` keeps within `budget` at
    the least cost; without a budget and plans it recomputes what costs next to nothing: norms, activations and
    arithmetic (cpu only)."""

    plans: Annotated[
        Plans,
        conflict(lambda plans, level: plans and _recomputes_layers(level), f"{_FOLLOWS_NO_PLANS}plans", "memory.level"),
        Row("{0}"),
    ] = ()
    """Plans to switch on, each `cluster:type:count`: `BiasGelu+:1:-1` recomputes (type 1) every (count -1) `BiasGelu`;
    type 0 is off, type 2 keeps a smaller-typed copy. The plan table of the report lists the clusters of your model."""

    plan_file: Annotated[
        FilePath | None,
        conflict(
            lambda file, level: file is not None and _recomputes_layers(level),
            f"{_FOLLOWS_NO_PLANS}file",
            "memory.level",
        ),
        conflict(
            lambda file, plans: file is not None and plans,
            "the file stands in place of memory.plans, and both are given; keep one of them",
            "memory.plans",
        ),
        Constraint(_unreadable_plans),
        Row("plans are read from {0}"),
    ] = None
    """A JSON file that holds a list of plans, in place of `plans`."""

    probe: Annotated[
        str,
        Field(pattern=r"^[01]:[01]$", examples=["1:0"]),
        conflict(
            lambda probe, level: _recomputes_layers(level) and probe not in (_PROBE, "1:1"),
            "memory.level {1} always searches with 1:1; write level 0, or remove the probe",
            "memory.level",
        ),
        NO_ROW,
    ] = _PROBE
    """The extent of the search for plans, `L:B`: L 0 goes through cheap operators only, 1 also through norms, softmax
    and matrix products; B 1 ends a plan at the boundary of a transformer layer. Levels 1 and 2 always search with
    `1:1`."""

    budget: Annotated[
        Budget | None,
        conflict(
            lambda budget, level: budget is not None and level != "auto",
            "a budget decides what to recompute, and memory.level {1} has; write level auto",
            "memory.level",
        ),
        Row("the least is computed again that keeps the predicted peak of a step within {0}"),
    ] = None
    """The peak memory that a step may take, as predicted: a size (`6GiB`), or a share (`0.5`) of the peak without
    recomputation. Parameters, gradients and optimizer states are counted in. What is measured is somewhat more."""

    offload: Annotated[
        bool,
        cuda_only(True, "write false"),
        conflict(
            lambda offload, budget: offload and budget is None,
            "values are moved to keep within memory.budget, and there is none; give a budget, such as 6GiB",
            "memory.budget",
        ),
        Row("no graph with a backward was compiled yet", State.OFF),
    ] = False
    """Let the budget also move kept values to pinned host memory and back, where that is cheapest (cuda only)."""

    early_gradient_release: bool = False
    """Hand each gradient to its parameter as soon as it exists, instead of all at the end of the backward. Saves memory
    when gradients are reduced or consumed at once, as under ZeRO or with `optimizer.step_in_backward`."""

    external_allocator: Annotated[Switch, cuda_only(True, "write auto or false")] = "auto"
    """Let ONNX Runtime take GPU memory from PyTorch's allocator, so that both share one pool (cuda only). `auto` does
    so while PyTorch computes on the device's default stream, unless `engine.provider_options` limits a pool of ONNX
    Runtime's own."""

    @property
    def frugal(self) -> bool:
        """True if less memory is worth a little time."""
        return self.budget is not None or _recomputes_layers(self.level)

    @property
    def decides_itself(self) -> bool:
        """True if no key says what to recompute, or how much memory a step may take."""
        return self.level == "auto" and self.budget is None and not self.plans and self.plan_file is None

    @property
    def saves(self) -> bool:
        """True if a key asks for something that saves memory."""
        return self.frugal or bool(self.plans) or self.plan_file is not None or self.early_gradient_release
