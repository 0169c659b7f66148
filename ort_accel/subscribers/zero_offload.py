"""The subscriber that runs a model under ZeRO stage 3 on the engine, for training loops around DeepSpeed's engine."""

from __future__ import annotations

from typing import Any

from torch import nn

from ort_accel import engine
from ort_accel.config import Config, load_config
from ort_accel.errors import OrtAccelError
from ort_accel.subscribers.base import SubscriberBase
from ort_accel.zero3 import accelerate_partitioned, is_partitioned, zero_optimizer_in


class ZeROOffloadSubscriber(SubscriberBase):
    """Runs a model under ZeRO stage 3 on the engine, in a training loop around DeepSpeed's engine:

        deepspeed_engine, *_ = deepspeed.initialize(model=model, ...)
        SubscriberManager().subscribe(model, [ZeROOffloadSubscriber(deepspeed_engine, "ort_accel.yaml")])

    Trainers and accelerate need no subscriber. A model that cannot run so stays plain, and its report gives the reason.
    """

    def __init__(self, deepspeed_engine: Any, config: engine.ConfigSource = None) -> None:
        self._zero = zero_optimizer_in(deepspeed_engine)
        self._config = config if isinstance(config, Config) else load_config(config)
        self._model: nn.Module | None = None

    def on_subscribe(self, model: nn.Module) -> None:
        if not is_partitioned(model):
            raise OrtAccelError(
                f"ZeRO stage 3 does not partition this {type(model).__name__}; give deepspeed.initialize "
                '"zero_optimization": {"stage": 3}, or call ort_accel.accelerate(model)'
            )
        accelerate_partitioned(model, self._config, self._zero)
        self._model = model

    def on_unsubscribe(self) -> None:
        if self._model is not None:
            engine.restore(self._model)
