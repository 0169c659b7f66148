"""`compute.loss_in_graph`: the Trainer's loss is compiled together with the model.

transformers' Trainer removes the labels from a batch if it smooths them, or if it has a `compute_loss_func`. A model
without labels computes the logits of every row. With the loss in its graph, rows with an ignored label are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from ort_accel import engine
from ort_accel.compiler.module_call import OutsideLoss
from ort_accel.errors import OrtAccelError

FEATURE = "compute.loss_in_graph"

Inputs = Mapping[str, Any]
Count = Tensor | int | None
"""The number of labels by which a sum of losses is divided; without it the loss is a mean."""


@dataclass(frozen=True)
class SmoothedLoss:
    """The loss of `LabelSmoother` as one operator of PyTorch, at least in single precision."""

    epsilon: float
    ignore_index: int
    is_shifted: bool
    """True if each row predicts the label of the next row."""

    def __call__(self, outputs: Any, labels: Tensor, count: Count) -> Tensor:
        """Returns the mean over labels that are not ignored; with a `count`, their sum divided by it."""
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        if self.is_shifted:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits, labels = logits.reshape(-1, logits.shape[-1]).to(dtype), labels.reshape(-1)
        options: dict[str, Any] = {"ignore_index": self.ignore_index, "label_smoothing": self.epsilon}
        if count is None:
            return cross_entropy(logits, labels, **options)
        total = cross_entropy(logits, labels, reduction="sum", **options)
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)


@dataclass(frozen=True)
class CustomLoss:
    """The loss of a `compute_loss_func`."""

    function: Callable[..., Tensor]

    def __call__(self, outputs: Any, labels: Tensor, count: Count) -> Tensor:
        """Call the function as the Trainer does."""
        return self.function(outputs, labels, num_items_in_batch=count)


@contextmanager
def loss_in_graph(trainer: Trainer, model: nn.Module, inputs: Inputs, count: Count) -> Iterator[None]:
    """While the context is entered, the model's call in a training step also computes the Trainer's loss."""
    inner = _unwrapped(model)
    config = engine.config_of(inner)
    name = "label_smoother" if trainer.compute_loss_func is None else "compute_loss_func"
    original = getattr(trainer, name)
    if config is None or config.compute.loss_in_graph is False or not model.training or original is None:
        yield
        return
    labels, reason = inputs.get("labels"), _refusal(model, inner, original, inputs)
    if reason:
        _refuse(inner, reason, config.compute.loss_in_graph is True)
        yield
        return
    loss = OutsideLoss(_compilable(trainer, inner, original), (labels, count))

    def computed(outputs: Any, *args: object, **named: object) -> Tensor:
        if loss.value is None:  # the model was not called in one piece
            _refuse(inner, "the model was not called as a whole", config.compute.loss_in_graph is True)
            return original(outputs, *args, **named)  # type: ignore[no-any-return]
        engine.report(inner).applied(FEATURE, f"the Trainer's {name} is compiled together with the model")
        value: Tensor = outputs["loss"] if isinstance(outputs, dict) else loss.value
        return value

    setattr(trainer, name, computed)
    try:
        with engine.together_with(inner, loss):
            yield
    finally:
        setattr(trainer, name, original)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Returns the accelerated model inside a wrapper such as DDP."""
    while engine.config_of(model) is None and isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def _refusal(model: nn.Module, inner: nn.Module, original: Callable[..., Tensor], inputs: Inputs) -> str:
    """Returns why the loss stays outside of the graph; empty if it can be inside."""
    if inputs.get("labels") is None:
        return "the batch has no labels"
    if engine.runs_by_layers(inner):
        return "the model runs layer by layer"
    if isinstance(original, LabelSmoother) and type(original) is not LabelSmoother:
        return f"{type(original).__name__} smooths labels in its own way"
    searches_outputs = isinstance(model, DistributedDataParallel) and (
        model.find_unused_parameters or model.static_graph
    )
    if searches_outputs and not getattr(getattr(inner, "config", None), "return_dict", False):
        return "DDP looks for the loss in the model's outputs, which are no dict"
    return ""


def _refuse(model: nn.Module, reason: str, is_wanted: bool) -> None:
    if is_wanted:
        raise OrtAccelError(f"{FEATURE} is true, but {reason}; write auto or false")
    engine.report(model).refused(FEATURE, reason)


def _compilable(trainer: Trainer, inner: nn.Module, original: Any) -> Callable[..., Tensor]:
    if trainer.compute_loss_func is not None:
        return CustomLoss(original)
    base: Any = inner.base_model.model if hasattr(inner, "peft_config") else inner  # type: ignore[union-attr]
    is_shifted = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return SmoothedLoss(original.epsilon, original.ignore_index, is_shifted)
