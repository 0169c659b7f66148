"""The trainers of transformers with their model on ONNX Runtime; loops and checkpoints are transformers'."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, Sampler
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from ort_accel.config import Config
from ort_accel.config.load import ConfigSource
from ort_accel.errors import OrtAccelError
from ort_accel.hf.activation import usable_config
from ort_accel.hf.callback import ORTAccelCallback
from ort_accel.hf.load_balancing import load_balanced_order
from ort_accel.hf.optimizer import BuildsOptimizer


class _OnOnnxRuntime(BuildsOptimizer):
    """A mixin for both trainers, which adds an argument and a callback."""

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *more: Any,
        ort_config: ConfigSource = None,
        **named: Any,
    ) -> None:
        self.ort_config = _one_config(ort_config, getattr(args, "ort_config", None))
        super().__init__(model, args, *more, **named)
        self._add_ort_callback(self.ort_config)

    def _add_ort_callback(self, config: Config) -> None:
        given = [callback for callback in self.callback_handler.callbacks if isinstance(callback, ORTAccelCallback)]
        if any(callback.config != config for callback in given):
            raise OrtAccelError(
                f"{type(self).__name__} was given an ORTAccelCallback with another configuration than its own; "
                "remove the callback: this trainer does its work"
            )
        if not given:
            callback = ORTAccelCallback(config)
            self.add_callback(callback)
            callback.on_init_end(self.args, model=self.model)

    def _get_train_sampler(self, train_dataset: Dataset[object] | None = None) -> Sampler[int] | None:
        sampler = load_balanced_order(self, self.ort_config, train_dataset)
        return super()._get_train_sampler(train_dataset) if sampler is None else sampler


class ORTTrainer(_OnOnnxRuntime, Trainer):
    """`transformers.Trainer` with its model on ONNX Runtime. Takes the same arguments, and `ort_config`.

    `ort_config` is a YAML file, its content as a dict, or a `Config`. It defaults to `ORTTrainingArguments.ort_config`,
    and then to the default configuration. An unusable configuration raises before anything is built.
    """


class ORTSeq2SeqTrainer(_OnOnnxRuntime, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with its model on ONNX Runtime. Takes the same arguments, and `ort_config`."""


def _one_config(from_call: ConfigSource, from_args: str | None) -> Config:
    if from_call is None or from_args is None:
        return usable_config(from_args if from_call is None else from_call)
    config = usable_config(from_call)
    if config != usable_config(from_args):
        raise OrtAccelError(
            f"the trainer was given one ort_config ({_named(from_call)}) and its training arguments another "
            f"({from_args}), and they differ; give only one of them"
        )
    return config


def _named(source: ConfigSource) -> str:
    return "a Config" if isinstance(source, Config) else str(source)
