"""`optimizer:` which optimizer the Trainer builds, and 16-bit training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.values import Section, Switch


class Fp16(Section):
    """fp32 master weights with a dynamic loss scale around the optimizer."""

    enabled: bool = False
    """Wrap the optimizer that the Trainer builds in `FP16_Optimizer`. For a model whose weights are 16-bit."""

    initial_scale: Annotated[float, Field(gt=0.0)] = 65536.0
    """The loss scale to begin with. Lower it if the first steps are all skipped."""

    growth_factor: Annotated[float, Field(gt=1.0)] = 2.0
    """The scale is multiplied by this after `window` steps without overflow."""

    backoff_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """The scale is multiplied by this when it falls."""

    window: Annotated[int, Field(ge=1)] = 2000
    """Steps without overflow before the scale grows."""

    hysteresis: Annotated[int, Field(ge=1)] = 1
    """The scale falls on this overflow in a row, and on every one that follows directly."""

    min_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """The scale never falls below this."""

    replace_checks: Switch = "auto"
    """Replace the per-tensor overflow checks and norms of an optimizer that DeepSpeed, Apex or Megatron made with one
    multi-tensor check. `auto` does so where a self-check shows equal results; `true` makes anything else an error."""


class Optimizer(Section):
    """Which optimizer the Trainer builds, and 16-bit training."""

    name: Literal["adamw_ort_fused"] | None = None
    """`adamw_ort_fused` builds FusedAdam; `null` leaves the choice to the training arguments."""

    mode: Literal["adam_l2", "adamw_hf", "adamw_torch"] = "adamw_torch"
    """The update rule: `adam_l2` is Adam with L2 regularization, `adamw_hf` decays after the update as Hugging Face's
    old AdamW did, `adamw_torch` decays first as `torch.optim.AdamW` does. Change it to continue an older run."""

    step_in_backward: bool = False
    """Update each parameter as soon as its gradient exists and free the gradient. Needs `name` and
    `memory.early_gradient_release`; excludes gradient clipping and accumulation."""

    fp16: Fp16 = Fp16()
    """fp32 master weights with a dynamic loss scale around the optimizer."""
