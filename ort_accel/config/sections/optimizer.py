"""`optimizer:` the optimizer that the Trainer builds, and 16-bit training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.declaration import NO_ROW, Row, conflict
from ort_accel.config.values import Section, Switch
from ort_accel.reporting.report import State


class Fp16(Section):
    """fp32 master weights with a dynamic loss scale around the optimizer."""

    enabled: Annotated[bool, Row("ORTTrainer keeps fp32 weights", State.OFF)] = False
    """Wrap the optimizer that the Trainer builds in `FP16_Optimizer`. For a model whose weights are 16-bit."""

    initial_scale: Annotated[float, Field(gt=0.0), NO_ROW] = 65536.0
    """The loss scale to begin with. Lower it if the first steps are all skipped."""

    growth_factor: Annotated[float, Field(gt=1.0), NO_ROW] = 2.0
    """The scale is multiplied by this after `window` steps without overflow."""

    backoff_factor: Annotated[float, Field(gt=0.0, lt=1.0), NO_ROW] = 0.5
    """The scale is multiplied by this when it falls."""

    window: Annotated[int, Field(ge=1), NO_ROW] = 2000
    """Steps without overflow before the scale grows."""

    hysteresis: Annotated[int, Field(ge=1), NO_ROW] = 1
    """The scale falls after so many consecutive overflows, and again on each further consecutive one."""

    min_scale: Annotated[
        float,
        Field(gt=0.0),
        conflict(
            lambda least, initial: least > initial,
            "above optimizer.fp16.initial_scale, which is {1:g}; lower this or raise that",
            "optimizer.fp16.initial_scale",
        ),
        NO_ROW,
    ] = 1.0
    """The scale never falls below this."""

    replace_checks: Annotated[
        Switch,
        Row(
            "for optimizers that DeepSpeed, Apex or Megatron made; there is none",
            State.OFF,
            off="switched off",
        ),
    ] = "auto"
    """Replace the per-tensor overflow checks and norms of an optimizer that DeepSpeed, Apex or Megatron made with one
    multi-tensor check. `auto` does so where a self-check shows equal results; `true` makes anything else an error."""


class Optimizer(Section):
    """The optimizer that the Trainer builds, and 16-bit training."""

    name: Annotated[
        Literal["adamw_ort_fused"] | None,
        Row("ORTTrainer builds {0}", State.OFF, off="left to the training arguments"),
    ] = None
    """`adamw_ort_fused` builds FusedAdam; `null` leaves the choice to the training arguments."""

    mode: Annotated[Literal["adam_l2", "adamw_hf", "adamw_torch"], NO_ROW] = "adamw_torch"
    """The update rule: `adam_l2` is Adam with L2 regularization, `adamw_hf` decays after the update as Hugging Face's
    old AdamW did, `adamw_torch` decays first as `torch.optim.AdamW` does. Change it to continue an older run."""

    step_in_backward: Annotated[
        bool,
        conflict(
            lambda step, name: step and name is None,
            "only an optimizer that is built here can do it; write optimizer.name: adamw_ort_fused",
            "optimizer.name",
        ),
        conflict(
            lambda step, early: step and not early,
            "each gradient must be there before the backward ends; write memory.early_gradient_release: true",
            "memory.early_gradient_release",
        ),
        conflict(
            lambda step, fp16: step and fp16,
            "an overflow is known only when all gradients are there; write false here or in optimizer.fp16.enabled",
            "optimizer.fp16.enabled",
        ),
        Row("ORTTrainer's optimizer does it; in a loop of your own use ort_accel.optim.step_in_backward", State.OFF),
    ] = False
    """Update each parameter as soon as its gradient exists and free the gradient. Needs `name` and
    `memory.early_gradient_release`; excludes gradient clipping and accumulation."""

    fp16: Fp16 = Fp16()
