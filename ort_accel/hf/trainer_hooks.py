"""Extensions of transformers' Trainer where its callback events do not suffice, for trainers with our callback.

There are no events for a data loader or a batch, for the computation of the loss, or for companion models. None comes
before a checkpoint is saved or before the loggers get a line. So these methods are extended in place, once. A Trainer
without our callback does not change, except for one whose model a launch runs on ONNX Runtime.
Checked on transformers 5.17 and 5.23; tests/hf/test_trainer_hooks.py says which assumption broke.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, wraps
from typing import Literal, Protocol

from torch import nn
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from ort_accel import engine
from ort_accel.hf.checkpoint import Trial, save_atomically
from ort_accel.hf.companions import on_companions, remember_trainer
from ort_accel.hf.loss_in_graph import Count, Inputs, loss_in_graph


class TrainerEvents(Protocol):
    """The interface of a callback that the extensions call."""

    def on_train_dataloader(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Returns a context in which the data loader of the training is built."""

    def on_batch(self, model: nn.Module | None, inputs: Inputs) -> None:
        """Called with each batch before the model is trained on it."""

    @property
    def metrics_target(self) -> Literal["loggers", "history", "none"]:
        """The parts of the training log that get the metrics."""

    def take_metrics(self) -> Mapping[str, float]:
        """Returns the metrics for the next line of the log."""

    def on_companion(self, model: nn.Module | None, companion: nn.Module) -> None:
        """Called with each model that is prepared for evaluation, which may be the trained one."""


@cache
def extend_trainer(kind: type[TrainerEvents]) -> None:
    """Extend `Trainer` for trainers that have a callback of this kind. A second call changes nothing."""

    def callback_in(handler: CallbackHandler) -> TrainerEvents | None:
        return next((callback for callback in handler.callbacks if isinstance(callback, kind)), None)

    def callback_of(trainer: Trainer) -> TrainerEvents | None:
        return callback_in(trainer.callback_handler)

    save_atomically_for(lambda trainer: callback_of(trainer) is not None)
    compile_losses()
    _extend("log", _logging(Trainer.log, callback_of))
    CallbackHandler.on_log = wraps(CallbackHandler.on_log)(  # type: ignore[method-assign]
        _telling(CallbackHandler.on_log, callback_in)
    )
    _extend("get_train_dataloader", _loading(Trainer.get_train_dataloader, callback_of))
    _extend("training_step", _training(Trainer.training_step, callback_of))
    _extend("create_accelerator_and_postprocess", _owning(Trainer.create_accelerator_and_postprocess))

    def handle_companion(trainer: Trainer, companion: nn.Module) -> None:
        callback = callback_of(trainer)
        if callback is not None:
            callback.on_companion(trainer.model, companion)

    on_companions(handle_companion)


_Finder = Callable[[Trainer], TrainerEvents | None]

_ATOMIC_FOR: list[Callable[[Trainer], bool]] = []


def save_atomically_for(wanted: Callable[[Trainer], bool]) -> None:
    """Make checkpoints atomic for the trainers for which `wanted` is true."""
    if not _ATOMIC_FOR:
        _extend("_save_checkpoint", _saving(Trainer._save_checkpoint))
    _ATOMIC_FOR.append(wanted)


@cache
def save_accelerated_atomically() -> None:
    """Make checkpoints atomic for every Trainer whose model runs on ONNX Runtime, with our callback or not."""
    save_atomically_for(lambda trainer: trainer.model is not None and engine.config_of(trainer.model) is not None)
    compile_losses()


@cache
def compile_losses() -> None:
    """Compile the loss of every Trainer together with its model, if the model runs on ONNX Runtime."""
    _extend("compute_loss", _joining(Trainer.compute_loss))


def _extend(name: str, method: Callable[..., object]) -> None:
    setattr(Trainer, name, wraps(getattr(Trainer, name))(method))


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    def save(self: Trainer, model: nn.Module, trial: Trial) -> None:
        if any(wanted(self) for wanted in _ATOMIC_FOR):
            save_atomically(self, lambda: original(self, model, trial), trial)
        else:
            original(self, model, trial)

    return save


def _logging(original: Callable[..., None], callback_of: _Finder) -> Callable[..., None]:
    def log(self: Trainer, logs: dict[str, float], start_time: float | None = None) -> None:
        callback = callback_of(self)
        if callback is not None and "loss" in logs and callback.metrics_target == "history":
            logs.update(callback.take_metrics())
        original(self, logs, start_time)

    return log


def _telling(
    original: Callable[..., object], callback_in: Callable[[CallbackHandler], TrainerEvents | None]
) -> Callable[..., object]:
    """Add the metrics after the Trainer has stored the line in its history, and before the loggers get it."""

    def on_log(
        self: CallbackHandler, args: object, state: object, control: object, logs: dict[str, float], **more: object
    ) -> object:
        callback = callback_in(self)
        if callback is not None and "loss" in logs and callback.metrics_target == "loggers":
            logs.update(callback.take_metrics())
        return original(self, args, state, control, logs, **more)

    return on_log


def _loading(original: Callable[..., object], callback_of: _Finder) -> Callable[..., object]:
    def get_train_dataloader(self: Trainer) -> object:
        callback = callback_of(self)
        if callback is None:
            return original(self)
        with callback.on_train_dataloader(self):
            return original(self)

    return get_train_dataloader


def _training(original: Callable[..., object], callback_of: _Finder) -> Callable[..., object]:
    def step(self: Trainer, model: nn.Module, inputs: object, *more: object, **named: object) -> object:
        callback = callback_of(self)
        if callback is not None and isinstance(inputs, Mapping):  # GRPO's inputs are rows of a dataset, not a batch yet
            callback.on_batch(self.model, inputs)
        return original(self, model, inputs, *more, **named)

    return step


def _owning(original: Callable[..., None]) -> Callable[..., None]:
    def create(self: Trainer) -> None:
        original(self)
        remember_trainer(self)

    return create


def _joining(original: Callable[..., object]) -> Callable[..., object]:
    def compute_loss(
        self: Trainer, model: nn.Module, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Count = None
    ) -> object:
        with loss_in_graph(self, model, inputs, num_items_in_batch):
            return original(self, model, inputs, return_outputs, num_items_in_batch)

    return compute_loss
