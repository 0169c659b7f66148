"""Models that a Trainer has beside the one that it trains: TRL's reference, reward and teacher models.

No event tells of them, but each goes through its Accelerator's `prepare_model`, for evaluation. Those of DeepSpeed and
FSDP do not, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from accelerate import Accelerator
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

import ort_accel
from ort_accel.config import Config

if TYPE_CHECKING:
    from transformers import Trainer

Told = Callable[["Trainer", nn.Module], None]
"""Told of a Trainer, and of a model that was prepared for it."""

_OWNERS: WeakKeyDictionary[Accelerator, ref[Trainer]] = WeakKeyDictionary()


def owns(trainer: Trainer) -> None:
    """Remember whose Accelerator a Trainer's is."""
    _OWNERS[trainer.accelerator] = ref(trainer)


def tell_of_companions(told: Told) -> None:
    """Call this for each model that the Accelerator of a Trainer prepares for evaluation."""
    original = Accelerator.prepare_model

    @wraps(original)
    def prepare_model(
        self: Accelerator, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        prepared: nn.Module = original(self, model, device_placement, evaluation_mode)
        owner = _OWNERS.get(self)
        if evaluation_mode and owner is not None and (trainer := owner()) is not None:
            told(trainer, prepared)
        return prepared

    Accelerator.prepare_model = prepare_model


def accelerate_companion(model: nn.Module, config: Config, name: str) -> bool:
    """Accelerate a model that is only evaluated; says whether that was done. What runs on a compiler stays as it is.
    The report file and the inspector are for the model that is trained, and files of ONNX models get this name."""
    if not config.engine.enabled or isinstance(model, OptimizedModule) or model._compiled_call_impl is not None:
        return False
    engine = config.engine.model_copy(update={"onnx_prefix": f"{config.engine.onnx_prefix}_{name}"})
    observe = config.observe.model_copy(update={"report_file": None})
    density = config.density.model_copy(update={"inspect": False})
    ort_accel.accelerate(model, config.model_copy(update={"engine": engine, "observe": observe, "density": density}))
    return True
