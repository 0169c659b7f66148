"""`memory:` what the forward keeps for the backward, and what is computed again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.values import EXACT, Budget, FilePath, Plans, Section, Switch


class Memory(Section):
    """What the forward keeps for the backward, and what is computed again."""

    level: Annotated[Literal["auto", 0, 1, 2], EXACT] = "auto"
    """How much to recompute. 0 follows `plans` only. 1 recomputes everything within each transformer layer and keeps
    the layers' inputs. 2 also keeps smaller-typed copies where a cast was there. `auto` keeps within `budget` at the
    least cost; without a budget and plans it recomputes what costs next to nothing: norms, activations and arithmetic
    (cpu only)."""

    plans: Plans = ()
    """Plans to switch on, each `cluster:type:count`: `BiasGelu+:1:-1` recomputes (type 1) every (count -1) `BiasGelu`;
    type 0 is off, type 2 keeps a smaller-typed copy. The plan table of the report lists the clusters of your model."""

    plan_file: FilePath | None = None
    """A JSON file that holds a list of plans, in place of `plans`."""

    probe: Annotated[str, Field(pattern=r"^[01]:[01]$", examples=["1:0"])] = "1:0"
    """How far plans are searched for, `L:B`: L 0 goes through cheap operators only, 1 also through norms, softmax and
    matrix products; B 1 ends a plan at the boundary of a transformer layer. Levels 1 and 2 always search with `1:1`."""

    budget: Budget | None = None
    """The peak memory that a step may take, as predicted: a size (`6GiB`), or a share (`0.5`) of the peak without
    recomputation. Parameters, gradients and optimizer states are counted in. What is measured is somewhat more."""

    offload: bool = False
    """Let the budget also move kept values to pinned host memory and back, where that is cheapest (cuda only)."""

    early_gradient_release: bool = False
    """Hand each gradient to its parameter as soon as it exists, instead of all at the end of the backward. Saves memory
    when gradients are reduced or consumed at once, as under ZeRO or with `optimizer.step_in_backward`."""

    external_allocator: Switch = "auto"
    """Let ONNX Runtime take GPU memory from PyTorch's allocator, so that both share one pool (cuda only). `auto` does
    so while PyTorch computes on the device's default stream, unless `engine.provider_options` limits a pool of ONNX
    Runtime's own."""

    @property
    def frugal(self) -> bool:
        """Whether less memory is worth a little time."""
        return self.budget is not None or self.level in (1, 2)

    @property
    def decides_itself(self) -> bool:
        """Whether nobody said what to recompute, or how much memory a step may take."""
        return self.level == "auto" and self.budget is None and not self.plans and self.plan_file is None

    @property
    def saves(self) -> bool:
        """Whether anything is asked for that saves memory."""
        return self.frugal or bool(self.plans) or self.plan_file is not None or self.early_gradient_release
