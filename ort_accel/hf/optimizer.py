"""The optimizer of a Trainer, by `optim="adamw_ort_fused"` or by the `optimizer:` section of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers import Trainer, TrainingArguments

import ort_accel
from ort_accel.config import Config
from ort_accel.config.values import Switch
from ort_accel.errors import OrtAccelError
from ort_accel.hf.activation import report_of
from ort_accel.optim import FusedAdam, StepInBackward, step_in_backward
from ort_accel.optim.accelerator_link import connect
from ort_accel.optim.decay import decayed
from ort_accel.optim.factory import MODES, with_fp32_weights
from ort_accel.optim.master_weights import MasterWeightOptimizer
from ort_accel.optim.modifiers import replace_checks

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    _Trainer = Trainer
    _Arguments = TrainingArguments
else:
    _Trainer = _Arguments = object

STEP_IN_BACKWARD = "optimizer.step_in_backward"

OPTIM = "adamw_ort_fused"
"""The name of FusedAdam in training arguments and in the configuration."""


@dataclass
class AcceptsFusedAdam(_Arguments):
    """A mixin for training arguments: `optim` may be `adamw_ort_fused`, which transformers does not know."""

    # The type is str, since a command line accepts only the members of an enumeration.
    optim: str = field(  # type: ignore[assignment]
        default=TrainingArguments.__dataclass_fields__["optim"].default,
        metadata={"help": f"The optimizer to use: {OPTIM}, or a name that transformers knows (see `OptimizerNames`)."},
    )

    def __post_init__(self) -> None:
        """Run the checks of transformers, with a name in `optim` that it knows."""
        is_fused_adam = self.optim == OPTIM
        if is_fused_adam:
            self.optim = "adamw_torch"
        super().__post_init__()  # type: ignore[no-untyped-call]
        if is_fused_adam:
            self.optim = OPTIM


class BuildsOptimizer(_Trainer):
    """A mixin for trainers: builds FusedAdam if it is asked for, and puts fp32 weights around the optimizer."""

    ort_config: Config

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns the parameters with weight decay; for FusedAdam those of `ort_accel.optim.decay_groups`."""
        return decayed(model) if self._wants_fused_adam() else super().get_decay_parameter_names(model)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Build the optimizer; the groups, and everything else about it, are made by transformers."""
        if self.optimizer is None and self._wants_fused_adam():
            self.optimizer_cls_and_kwargs = self._fused_adam()
        built = super().create_optimizer(model)
        if self.ort_config.optimizer.fp16.enabled and not isinstance(built, MasterWeightOptimizer):
            if self.is_deepspeed_enabled or self.is_fsdp_enabled:
                who = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP"
                raise OrtAccelError(
                    f"optimizer.fp16.enabled is true, and {who} keeps fp32 weights itself; remove the key, and ask "
                    f"{who} for 16-bit training in its own configuration"
                )
            self.optimizer = with_fp32_weights(built, self.ort_config.optimizer)
            connect(self.accelerator, self.optimizer)
        return self.optimizer  # type: ignore[return-value]

    def _wants_fused_adam(self) -> bool:
        return self.ort_config.optimizer.name == OPTIM or self.args.optim == OPTIM

    def _fused_adam(self) -> tuple[type[FusedAdam], dict[str, object]]:
        given = self.optimizer_cls_and_kwargs
        if given is not None and given[0] is not FusedAdam:
            raise OrtAccelError(
                f"the trainer was given {given[0].__name__} in optimizer_cls_and_kwargs, and {OPTIM} by its arguments "
                "or its configuration; give only one of them"
            )
        return FusedAdam, {
            "lr": self.args.learning_rate,
            "betas": (self.args.adam_beta1, self.args.adam_beta2),
            "eps": self.args.adam_epsilon,
            "adam_w_mode": MODES[self.ort_config.optimizer.mode],
        }


def check_optimizer(optimizer: object, model: nn.Module, config: Config) -> None:
    """Check a Trainer's optimizer against the configuration, replace its slow checks, and report the result."""
    chain = _chain(optimizer)
    present = type(chain[-1]).__name__ if chain else "no optimizer"
    settings = config.optimizer
    adam = fused_adam_in(optimizer)
    if settings.name == OPTIM and adam is None:
        raise OrtAccelError(
            f"optimizer.name is {OPTIM}, and this Trainer trains with {present}; use ORTTrainer, "
            "which builds it, and pass no optimizer, or pass optimizers=(ort_accel.optim.build_optimizer(...), None)"
        )
    masters = next((each for each in chain if isinstance(each, MasterWeightOptimizer)), None)
    if settings.fp16.enabled and masters is None:
        raise OrtAccelError(
            f"optimizer.fp16.enabled is true, and this Trainer trains with {present} alone; use "
            "ORTTrainer, which puts fp32 weights around it"
        )
    effects: dict[str, str] = {}
    if adam is not None:
        exempt = sum(len(group["params"]) for group in adam.param_groups if not group["weight_decay"])
        effects["optimizer.name"] = f"FusedAdam, {settings.mode}; {exempt} parameters without decay"
    if masters is not None:
        effects["optimizer.fp16.enabled"] = f"fp32 weights, loss scale {masters.loss_scale.scale:g}"
    reason = _replace_checks(optimizer, settings.fp16.replace_checks, effects)
    if config.engine.enabled and (effects or reason):
        report = ort_accel.report(model)
        for name, effect in effects.items():
            report.applied(name, effect)
        if reason:
            report.refused("optimizer.fp16.replace_checks", reason)


def fused_adam_in(optimizer: object) -> FusedAdam | None:
    """Returns the optimizer itself or the one inside it that is a FusedAdam; None without one."""
    return next((each for each in _chain(optimizer) if isinstance(each, FusedAdam)), None)


def step_in_backward_if_configured(
    args: TrainingArguments, optimizer: object, model: nn.Module, config: Config
) -> StepInBackward | None:
    """Let a Trainer's optimizer update parameters within the backward, if `optimizer.step_in_backward` is true."""
    if not config.optimizer.step_in_backward:
        return None
    if obstacles := _needs_of_all_gradients(args):
        raise OrtAccelError(f"{STEP_IN_BACKWARD} is true, and {'; '.join(obstacles)}; or write false")
    adam = fused_adam_in(optimizer)
    assert adam is not None, "check_optimizer has refused every other optimizer"
    if config.engine.enabled:
        effect = "each parameter is updated as soon as its gradient exists, which is then freed"
        report_of(model, config).applied(STEP_IN_BACKWARD, effect)
    return step_in_backward(adam)


def _needs_of_all_gradients(args: TrainingArguments) -> list[str]:
    """Returns the training arguments that need all gradients at once, each with the value to set instead."""
    found = []
    if args.max_grad_norm:
        found.append(f"max_grad_norm={args.max_grad_norm:g} clips by the norm of all gradients: set max_grad_norm=0")
    if args.gradient_accumulation_steps > 1:
        steps = args.gradient_accumulation_steps
        found.append(f"gradients are accumulated over {steps} batches: set gradient_accumulation_steps=1")
    if args.fp16:
        found.append("fp16 scales the loss and may skip a step: train in bf16 or fp32")
    if args.world_size > 1:
        found.append(f"{args.world_size} processes average their gradients first: train in one process")
    return found


def _replace_checks(optimizer: object, switch: Switch, effects: dict[str, str]) -> str:
    """Replace a framework's slow checks. Returns why none of its checks were replaced; empty otherwise."""
    if switch is False:
        return ""
    replaced = replace_checks(optimizer)
    reasons = "; ".join(replaced.refusals) if replaced else "no DeepSpeed, Apex or Megatron made this optimizer"
    if switch is True and (replaced is None or replaced.refusals):
        raise OrtAccelError(f"optimizer.fp16.replace_checks is true, and it cannot be: {reasons}; write auto or false")
    if replaced is None:
        return ""
    if replaced.methods:
        effects["optimizer.fp16.replace_checks"] = f"{', '.join(replaced.methods)} of {replaced.maker}"
    return "" if replaced.methods else reasons


def _chain(optimizer: object) -> list[object]:
    """Returns an optimizer, the one inside it, and so on."""
    found = []
    while optimizer is not None:
        found.append(optimizer)
        optimizer = vars(optimizer).get("optimizer")
    return found
