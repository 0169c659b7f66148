"""Three methods of transformers' Trainer that no callback event covers, extended for trainers that have our callback.

A callback is told that a checkpoint was saved, not that one is about to be; it sees the log after the reporters; it
never sees a batch. So these three are extended in place, once. A Trainer without our callback runs as before.
Checked on transformers 5.23; tests/hf/test_trainer_hooks.py says which assumption broke.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, Protocol

from transformers import Trainer

from ort_accel.hf.checkpoint import save_whole


class HasMetrics(Protocol):
    """What the hooks need of a callback."""

    def see(self, model: Any, inputs: Mapping[str, Any]) -> None:
        """A batch is about to be trained on."""

    def figures(self) -> Mapping[str, float]:
        """What stands beside the loss in the log."""


@cache
def install(kind: type[HasMetrics]) -> None:
    """Extend `Trainer` for those of its objects that have a callback of this kind. A second call changes nothing."""

    def ours(trainer: Trainer) -> HasMetrics | None:
        return next((callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)), None)

    _extend("_save_checkpoint", _saving(Trainer._save_checkpoint, ours))
    _extend("log", _logging(Trainer.log, ours))
    _extend("training_step", _training(Trainer.training_step, ours))


_Finder = Callable[[Trainer], HasMetrics | None]


def _extend(name: str, method: Callable[..., Any]) -> None:
    setattr(Trainer, name, wraps(getattr(Trainer, name))(method))


def _saving(original: Callable[..., None], ours: _Finder) -> Callable[..., None]:
    def save(self: Trainer, model: Any, trial: Any) -> None:
        if ours(self) is None:
            original(self, model, trial)
        else:
            save_whole(self, lambda: original(self, model, trial), trial)

    return save


def _logging(original: Callable[..., None], ours: _Finder) -> Callable[..., None]:
    def log(self: Trainer, logs: dict[str, float], start_time: float | None = None) -> None:
        callback = ours(self)
        if callback is not None and "loss" in logs:
            logs.update(callback.figures())
        original(self, logs, start_time)

    return log


def _training(original: Callable[..., Any], ours: _Finder) -> Callable[..., Any]:
    def step(self: Trainer, model: Any, inputs: Mapping[str, Any], *more: Any, **named: Any) -> Any:
        callback = ours(self)
        if callback is not None:
            callback.see(self.model, inputs)
        return original(self, model, inputs, *more, **named)

    return step
