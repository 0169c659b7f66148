"""Methods of transformers' Trainer that no callback event covers, extended for trainers that have our callback.

A callback is told that a checkpoint was saved, not that one is about to be; it sees the log after the reporters; it
never sees a batch; what the Trainer makes of a model's outputs is behind the model; and no other model than the trained
one is shown to it. So these are extended in place, once. A Trainer without our callback runs as before, but for
one whose model a launch put on ONNX Runtime.
Checked on transformers 5.17 and 5.23; tests/hf/test_trainer_hooks.py says which assumption broke.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, Literal, Protocol

from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from ort_accel import engine
from ort_accel.hf.checkpoint import save_whole
from ort_accel.hf.companions import owns, tell_of_companions
from ort_accel.hf.loss_in_graph import loss_in_graph


class HasMetrics(Protocol):
    """What the hooks need of a callback."""

    def see(self, model: Any, inputs: Mapping[str, Any]) -> None:
        """A batch is about to be trained on."""

    @property
    def where(self) -> Literal["loggers", "history", "none"]:
        """Which parts of the training log have the figures."""

    def figures(self) -> Mapping[str, float]:
        """What stands beside the loss in the log."""

    def accompany(self, model: Any, companion: Any) -> None:
        """A model is about to be evaluated: another one than is trained, or that one itself."""


@cache
def install(kind: type[HasMetrics]) -> None:
    """Extend `Trainer` for those of its objects that have a callback of this kind. A second call changes nothing."""

    def ours_in(handler: CallbackHandler) -> HasMetrics | None:
        return next((callback for callback in handler.callbacks if isinstance(callback, kind)), None)

    def ours(trainer: Trainer) -> HasMetrics | None:
        return ours_in(trainer.callback_handler)

    save_whole_for(lambda trainer: ours(trainer) is not None)
    join_losses()
    _extend("log", _logging(Trainer.log, ours))
    CallbackHandler.on_log = wraps(CallbackHandler.on_log)(  # type: ignore[method-assign]
        _telling(CallbackHandler.on_log, ours_in)
    )
    _extend("training_step", _training(Trainer.training_step, ours))
    _extend("create_accelerator_and_postprocess", _owning(Trainer.create_accelerator_and_postprocess))

    def told(trainer: Trainer, companion: Any) -> None:
        callback = ours(trainer)
        if callback is not None:
            callback.accompany(trainer.model, companion)

    tell_of_companions(told)


_Finder = Callable[[Trainer], HasMetrics | None]

_WHO_SAVES_WHOLE: list[Callable[[Trainer], bool]] = []


def save_whole_for(wanted: Callable[[Trainer], bool]) -> None:
    """Let those trainers write their checkpoints aside and rename them last for which this says so."""
    if not _WHO_SAVES_WHOLE:
        _extend("_save_checkpoint", _saving(Trainer._save_checkpoint))
    _WHO_SAVES_WHOLE.append(wanted)


@cache
def save_whole_what_is_accelerated() -> None:
    """The same for every Trainer whose model runs on ONNX Runtime, with our callback or not."""
    save_whole_for(lambda trainer: trainer.model is not None and engine.config_of(trainer.model) is not None)
    join_losses()


@cache
def join_losses() -> None:
    """Compile a loss that a Trainer computes itself together with its model, where that runs on ONNX Runtime."""
    _extend("compute_loss", _joining(Trainer.compute_loss))


def _extend(name: str, method: Callable[..., Any]) -> None:
    setattr(Trainer, name, wraps(getattr(Trainer, name))(method))


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    def save(self: Trainer, model: Any, trial: Any) -> None:
        if any(wanted(self) for wanted in _WHO_SAVES_WHOLE):
            save_whole(self, lambda: original(self, model, trial), trial)
        else:
            original(self, model, trial)

    return save


def _logging(original: Callable[..., None], ours: _Finder) -> Callable[..., None]:
    def log(self: Trainer, logs: dict[str, float], start_time: float | None = None) -> None:
        callback = ours(self)
        if callback is not None and "loss" in logs and callback.where == "history":
            logs.update(callback.figures())
        original(self, logs, start_time)

    return log


def _telling(
    original: Callable[..., Any], ours_in: Callable[[CallbackHandler], HasMetrics | None]
) -> Callable[..., Any]:
    """Add the figures after the Trainer has put its copy of the line into its state, and before loggers see it."""

    def on_log(self: CallbackHandler, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any) -> Any:
        callback = ours_in(self)
        if callback is not None and "loss" in logs and callback.where == "loggers":
            logs.update(callback.figures())
        return original(self, args, state, control, logs, **more)

    return on_log


def _training(original: Callable[..., Any], ours: _Finder) -> Callable[..., Any]:
    def step(self: Trainer, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        callback = ours(self)
        if callback is not None and isinstance(inputs, Mapping):  # GRPO's are rows of a data set, not yet a batch
            callback.see(self.model, inputs)
        return original(self, model, inputs, *more, **named)

    return step


def _owning(original: Callable[..., None]) -> Callable[..., None]:
    def create(self: Trainer) -> None:
        original(self)
        owns(self)

    return create


def _joining(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(
        self: Trainer, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with loss_in_graph(self, model, inputs, num_items_in_batch):
            return original(self, model, inputs, return_outputs, num_items_in_batch)

    return compute_loss
