"""`optimizer.step_in_backward` in a Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from ort_accel.config import Config
from ort_accel.errors import OrtAccelError
from ort_accel.hf.activation import report_of
from ort_accel.hf.optimizer import fused_adam_in
from ort_accel.optim import StepInBackward, step_in_backward

if TYPE_CHECKING:
    from torch import nn

FEATURE = "optimizer.step_in_backward"


def record_step_in_backward(
    args: TrainingArguments, optimizer: Any, model: nn.Module, config: Config
) -> StepInBackward | None:
    """Let the Trainer's optimizer update parameters within the backward, where the configuration asks for that."""
    if not config.optimizer.step_in_backward:
        return None
    obstacles = _obstacles(args)
    if obstacles:
        raise OrtAccelError(f"{FEATURE} is true, and {'; '.join(obstacles)}; or write false")
    adam = fused_adam_in(optimizer)
    assert adam is not None, "settle_optimizer has refused every other one"
    if config.engine.enabled:
        effect = "each parameter is updated as soon as its gradient exists, which is then freed"
        report_of(model, config).applied(FEATURE, effect)
    return step_in_backward(adam)


def _obstacles(args: TrainingArguments) -> list[str]:
    """What in the training arguments needs all gradients at once, and how to do without."""
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
