"""`compute.loss_in_graph`: a loss that a Trainer computes from a model's outputs, compiled together with the model.

transformers' Trainer takes the labels out of a batch where it smooths them, or where it was given `compute_loss_func`.
A model that does not see the labels computes every row of its scores. With the loss in its graph, rows whose label is
ignored need not be computed.
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


@dataclass(frozen=True)
class SmoothedLoss:
    """What `LabelSmoother` computes, as the one operator that PyTorch has for it, in single precision at the least."""

    epsilon: float
    ignore_index: int
    shifted: bool
    """Whether each row is to tell the label of the next one."""

    def __call__(self, outputs: Any, labels: Tensor, count: Tensor | int | None) -> Tensor:
        """The mean over the labels that are not ignored; with a `count`, their sum divided by it."""
        scores = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        if self.shifted:
            scores, labels = scores[..., :-1, :], labels[..., 1:]
        wide = torch.promote_types(scores.dtype, torch.float32)
        scores, labels = scores.reshape(-1, scores.shape[-1]).to(wide), labels.reshape(-1)
        how: dict[str, Any] = {"ignore_index": self.ignore_index, "label_smoothing": self.epsilon}
        if count is None:
            return cross_entropy(scores, labels, **how)
        total = cross_entropy(scores, labels, reduction="sum", **how)
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)


@dataclass(frozen=True)
class GivenLoss:
    """A `compute_loss_func`."""

    function: Callable[..., Tensor]

    def __call__(self, outputs: Any, labels: Tensor, count: Tensor | int | None) -> Tensor:
        """As the Trainer calls it."""
        return self.function(outputs, labels, num_items_in_batch=count)


@contextmanager
def loss_in_graph(trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], count: Any) -> Iterator[None]:
    """While this is entered, a training step's call of the model computes the Trainer's loss, too."""
    inner = _inside(model)
    config = engine.config_of(inner)
    name = "label_smoother" if trainer.compute_loss_func is None else "compute_loss_func"
    present = getattr(trainer, name)
    if config is None or config.compute.loss_in_graph is False or not model.training or present is None:
        yield
        return
    labels, reason = inputs.get("labels"), _refusal(model, inner, present, inputs)
    if reason:
        _refuse(inner, reason, config.compute.loss_in_graph is True)
        yield
        return
    loss = OutsideLoss(_compilable(trainer, inner, present), (labels, count))

    def computed(outputs: Any, *args: Any, **named: Any) -> Tensor:
        if loss.value is None:  # the model was not called, or not as a whole
            _refuse(inner, "the model was not called as a whole", config.compute.loss_in_graph is True)
            return present(outputs, *args, **named)  # type: ignore[no-any-return]
        engine.report(inner).applied(FEATURE, f"the Trainer's {name} is compiled together with the model")
        given: Tensor = outputs["loss"] if isinstance(outputs, dict) else loss.value
        return given

    setattr(trainer, name, computed)
    try:
        with engine.together_with(inner, loss):
            yield
    finally:
        setattr(trainer, name, present)


def _inside(model: nn.Module) -> nn.Module:
    """The model in what wraps it, such as DDP."""
    while engine.config_of(model) is None and isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def _refusal(model: nn.Module, inner: nn.Module, present: Any, inputs: Mapping[str, Any]) -> str:
    """Why a loss stays outside; empty where nothing speaks for that."""
    if inputs.get("labels") is None:
        return "the batch has no labels"
    if engine.runs_by_layers(inner):
        return "the model runs layer by layer"
    if isinstance(present, LabelSmoother) and type(present) is not LabelSmoother:
        return f"{type(present).__name__} smooths labels in its own way"
    looks = isinstance(model, DistributedDataParallel) and (model.find_unused_parameters or model.static_graph)
    if looks and not getattr(getattr(inner, "config", None), "return_dict", False):
        return "DDP looks for the loss in the model's outputs, which are no dict"
    return ""


def _refuse(model: nn.Module, reason: str, is_wanted: bool) -> None:
    if is_wanted:
        raise OrtAccelError(f"{FEATURE} is true, but {reason}; write auto or false")
    engine.report(model).refused(FEATURE, reason)


def _compilable(trainer: Trainer, inner: nn.Module, present: Any) -> Callable[..., Tensor]:
    if trainer.compute_loss_func is not None:
        return GivenLoss(present)
    base: Any = inner.base_model.model if hasattr(inner, "peft_config") else inner  # type: ignore[union-attr]
    shifted = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return SmoothedLoss(present.epsilon, present.ignore_index, shifted)
