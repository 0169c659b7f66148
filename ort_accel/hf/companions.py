"""Companion models, which a Trainer evaluates beside the one that it trains: TRL's reference, reward and teacher.

They are found in `prepare_model` of the Trainer's Accelerator, since no event of the Trainer mentions them. Companions
under DeepSpeed and FSDP do not go through it, and stay plain.
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

CompanionHandler = Callable[["Trainer", nn.Module], None]
"""A function that is called with a Trainer and a model that was prepared for its evaluation."""

_TRAINERS: WeakKeyDictionary[Accelerator, ref[Trainer]] = WeakKeyDictionary()


def remember_trainer(trainer: Trainer) -> None:
    """Remember the Trainer of an Accelerator."""
    _TRAINERS[trainer.accelerator] = ref(trainer)


def on_companions(handler: CompanionHandler) -> None:
    """Call the handler for each model that a Trainer's Accelerator prepares for evaluation."""
    original = Accelerator.prepare_model

    @wraps(original)
    def prepare_model(
        self: Accelerator, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        prepared: nn.Module = original(self, model, device_placement, evaluation_mode)
        weak = _TRAINERS.get(self)
        if evaluation_mode and weak is not None and (trainer := weak()) is not None:
            handler(trainer, prepared)
        return prepared

    Accelerator.prepare_model = prepare_model


def accelerate_companion(model: nn.Module, config: Config, name: str) -> bool:
    """Accelerate a model that is only evaluated. Returns false for a model that another compiler runs.

    It has no report file and no inspector, and its ONNX files get this name.
    """
    if not config.engine.enabled or isinstance(model, OptimizedModule) or model._compiled_call_impl is not None:
        return False
    engine = config.engine.model_copy(update={"onnx_prefix": f"{config.engine.onnx_prefix}_{name}"})
    observe = config.observe.model_copy(update={"report_file": None})
    density = config.density.model_copy(update={"inspect": False})
    ort_accel.accelerate(model, config.model_copy(update={"engine": engine, "observe": observe, "density": density}))
    return True
