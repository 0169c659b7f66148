"""The callback that runs the model of any Trainer on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments

import ort_accel
from ort_accel.autotune.throughput import Machine, peak_flops_per_s
from ort_accel.config import Config
from ort_accel.config.load import ConfigSource
from ort_accel.engine import call_of, foresee, inspector_of, report_file_of
from ort_accel.errors import OrtAccelError
from ort_accel.hf.activation import activate, report_of, usable_config
from ort_accel.hf.batch_shapes import shapes_of_batches
from ort_accel.hf.companions import accelerate_companion
from ort_accel.hf.load_balancing import record_load_balancing
from ort_accel.hf.metrics import StepMetrics
from ort_accel.hf.optimizer import check_optimizer, step_in_backward_if_configured
from ort_accel.hf.packing import packed_training_set, record_packing
from ort_accel.hf.trainer_hooks import extend_trainer
from ort_accel.observe.density import DensityInspector
from ort_accel.observe.report_file import ReportFile
from ort_accel.optim import StepInBackward
from ort_accel.subscribers import StatisticsSubscriber, SubscriberManager

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer

    from ort_accel.compiler.module_call import ModelCall


class ORTAccelCallback(TrainerCallback):
    """Runs the model of an unmodified Trainer on ONNX Runtime: `Trainer(..., callbacks=[ORTAccelCallback("x.yaml")])`.

    It adds the numbers of `StepMetrics` to each line of the training log, and makes checkpoints atomic. An unusable
    configuration raises here, before the Trainer is built.
    """

    def __init__(self, config: ConfigSource = None) -> None:
        self.config = usable_config(config)
        self._call: ModelCall | None = None
        """The call of the current model; a hyperparameter search replaces the model in each trial."""
        self._args: TrainingArguments | None = None
        """The arguments of the Trainer that has this model."""
        self._activations: SubscriberManager | None = None
        self._step_in_backward: StepInBackward | None = None
        self._file: ReportFile | None = None
        self._inspector: DensityInspector | None = None
        self._companions: WeakSet[nn.Module] = WeakSet()
        self.metrics = StepMetrics()
        extend_trainer(ORTAccelCallback)

    def start(self, args: TrainingArguments, model: nn.Module, optimizer: object = None) -> None:
        """Activate the model of a Trainer; a model that runs as configured does not change."""
        if self.config.engine.enabled and args.n_gpu > 1:
            raise OrtAccelError(
                f"one process with {args.n_gpu} GPUs trains under torch.nn.DataParallel, which copies the model in "
                "every step, so that nothing compiled for it stays valid; start one process a GPU "
                f"(`torchrun --nproc_per_node {args.n_gpu} script.py`), or show it only one (`CUDA_VISIBLE_DEVICES=0`)"
            )
        if self.config.engine.enabled and args.torch_compile:
            raise OrtAccelError(
                "torch_compile is true in the training arguments, and a model has one compiler; remove torch_compile, "
                "or set engine.enabled to false"
            )
        if self.config.engine.enabled and args.device.type == "mps":
            raise OrtAccelError(
                "the Trainer puts its model on mps, and no ONNX Runtime trains there; set use_cpu=True in its arguments"
            )
        earlier = self._call if self._args is args else None  # another Trainer's model keeps its compiled code
        activate(model, self.config, optimizer, earlier)
        self._call, self._args = call_of(model), args

    def on_init_end(self, args: TrainingArguments, *_: object, **named: Any) -> None:
        """Activate the model, so that evaluation without training runs on ONNX Runtime, too."""
        self.start(args, named["model"])

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **named: Any) -> None:
        """Activate the model, which `model_init` may have replaced, and configure everything else for the training."""
        self.start(args, named["model"], named.get("optimizer"))
        steps = state.max_steps * args.gradient_accumulation_steps
        shapes = shapes_of_batches(named.get("train_dataloader"), steps)
        shapes.batch |= args.eval_strategy != "no" and args.eval_batch_size != args.train_batch_size
        for model in (named["model"], *self._companions):
            foresee(model, shapes)
        check_optimizer(named.get("optimizer"), named["model"], self.config)
        self._stop_watching()  # a training that was interrupted
        optimizer = named.get("optimizer")
        self._step_in_backward = step_in_backward_if_configured(args, optimizer, named["model"], self.config)
        self._activations = _record_activations(named["model"], self.config)
        report = self.metrics.report = report_of(named["model"], self.config)
        report.series.clear()  # of an earlier training
        self.metrics.counts_flops = self.config.observe.metrics != "none"
        self.metrics.peak = partial(_peak, named["model"], args)
        record_packing(report, self.config, named.get("train_dataloader"))
        record_load_balancing(report, self.config, named.get("train_dataloader"), args.world_size)
        if self.config.density.inspect:
            every, level = self.config.density.inspect_every, self.config.observe.log_level
            self._inspector = inspector_of(named["model"]) or DensityInspector(report, every, level)
            self._inspector.is_fed = True
        path = self.config.observe.report_file
        if path is not None:
            self._file = report_file_of(named["model"]) or ReportFile(report, path)

    def on_train_end(self, *_: object, **__: object) -> None:
        """Remove everything that watches the model, and write the report."""
        self._stop_watching()
        self.metrics.take()
        if self._inspector is not None:
            self._inspector.settle()
            self._inspector.is_fed = False
        if self._file is not None:
            self._file.write()

    def _stop_watching(self) -> None:
        if self._step_in_backward is not None:
            self._step_in_backward.remove()
            self._step_in_backward = None
        if self._activations is not None:
            self._activations.unsubscribe()
            self._activations = None

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Start the timer of an optimizer step."""
        self.metrics.begin_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:  # noqa: ARG002
        """Stop the timer."""
        self.metrics.end_step(state.global_step)

    def on_train_dataloader(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Returns a context in which the Trainer has a packed training set, if the configuration asks for one."""
        return packed_training_set(trainer, self.config)

    def on_batch(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Inspect a batch before the model is trained on it."""
        self.metrics.count_tokens(inputs)
        if self._inspector is not None:
            self._inspector.see(model, inputs)

    def on_companion(self, model: nn.Module, companion: nn.Module) -> None:
        """Run a model on ONNX Runtime that is only evaluated beside the trained one."""
        name = f"companion_{len(self._companions)}"
        if companion is not model and accelerate_companion(companion, self.config, name):
            self._companions.add(companion)
            kind = type(companion).__name__
            report_of(model, self.config).note(f"a {kind} that is only evaluated beside this model runs there, too")

    @property
    def metrics_target(self) -> Literal["loggers", "history", "none"]:
        """The parts of the training log that get the metrics."""
        return self.config.observe.metrics

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics since the last line of the log."""
        values = self.metrics.take()
        if values and self._inspector is not None:
            self._inspector.settle()
            values |= self._inspector.needed()
        return values


def _peak(model: nn.Module, args: TrainingArguments) -> float | None:
    """Returns the floating point operations a second that a model's device can do, in the type of its products."""
    call = call_of(model)
    if call is None:
        return None
    of_weights = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else of_weights
    settings = call.backend.settings
    return peak_flops_per_s(Machine(settings.session, settings.opset), dtype)


def _record_activations(model: nn.Module, config: Config) -> SubscriberManager | None:
    """Begin to write statistics of a model's activations, if the configuration asks for them."""
    settings = config.observe.activation_statistics
    if settings is None:
        return None
    subscriber = StatisticsSubscriber(
        settings.output_dir,
        start_step=settings.start_step,
        end_step=settings.end_step,
        override_output_dir=settings.override_output_dir,
        run_on_cpu=settings.run_on_cpu,
        bucket_size=settings.bucket_size,
    )
    if config.engine.enabled:
        ort_accel.report(model).applied("observe.activation_statistics", f"written to {settings.output_dir}")
    return SubscriberManager().subscribe(model, [subscriber])
