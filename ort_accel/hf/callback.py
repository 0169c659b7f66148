"""ort_accel for any Trainer that takes callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from transformers import TrainerCallback, TrainerState, TrainingArguments

from ort_accel.engine import call_of, foresee, inspector_of, report_file_of
from ort_accel.errors import OrtAccelError
from ort_accel.hf.activation import ConfigSource, activate, report_of, usable_config
from ort_accel.hf.companions import accelerate_companion
from ort_accel.hf.foreseen_sizes import foreseen_in
from ort_accel.hf.in_backward import record_step_in_backward
from ort_accel.hf.load_balancing import record_load_balancing
from ort_accel.hf.metrics import StepMetrics
from ort_accel.hf.optimizer import settle_optimizer
from ort_accel.hf.statistics import record_activations
from ort_accel.hf.trainer_hooks import install
from ort_accel.observe.density import DensityInspector
from ort_accel.observe.report_file import ReportFile
from ort_accel.optim import StepInBackward
from ort_accel.subscribers import SubscriberManager

if TYPE_CHECKING:
    from torch import nn

    from ort_accel.compiler.module_call import ModelCall


class ORTAccelCallback(TrainerCallback):
    """Runs the model of an unmodified Trainer on ONNX Runtime: `Trainer(..., callbacks=[ORTAccelCallback("x.yaml")])`.

    It adds the numbers of `StepMetrics` to what the Trainer's loggers get of each line of the training log, and its
    checkpoints get their name when they are whole. A configuration that cannot be used is an error here, before the
    Trainer is built.
    """

    def __init__(self, config: ConfigSource = None) -> None:
        self.config = usable_config(config)
        self._call: ModelCall | None = None
        """What the model runs; a search replaces the model for each of its trials."""
        self._activations: SubscriberManager | None = None
        self._in_backward: StepInBackward | None = None
        self._file: ReportFile | None = None
        self._inspector: DensityInspector | None = None
        self._companions: WeakSet[nn.Module] = WeakSet()
        self.metrics = StepMetrics()
        install(ORTAccelCallback)

    def start(self, args: TrainingArguments, model: nn.Module, optimizer: Any = None) -> None:
        """Activate the model of a Trainer; what already runs as configured is left as it is."""
        if self.config.engine.enabled and args.n_gpu > 1:
            raise OrtAccelError(
                f"one process with {args.n_gpu} GPUs trains under torch.nn.DataParallel, which copies the model in "
                "every step, so that nothing compiled for it stays valid; start one process a GPU "
                f"(`torchrun --nproc_per_node {args.n_gpu} script.py`), or show it only one (`CUDA_VISIBLE_DEVICES=0`)"
            )
        if self.config.engine.enabled and args.device.type == "mps":
            raise OrtAccelError(
                "the Trainer puts its model on mps, and no ONNX Runtime trains there; set use_cpu=True in its arguments"
            )
        activate(model, self.config, optimizer, self._call)
        self._call = call_of(model)

    def on_init_end(self, args: TrainingArguments, *_: Any, **named: Any) -> None:
        """Activate the model, so that evaluation without training runs on it too."""
        self.start(args, named["model"])

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **named: Any) -> None:
        """Activate the model again: with `model_init` the Trainer has made a new one. Then settle its optimizer."""
        self.start(args, named["model"], named.get("optimizer"))
        steps = state.max_steps * args.gradient_accumulation_steps
        sizes = foreseen_in(named.get("train_dataloader"), steps)
        sizes.batch |= args.eval_strategy != "no" and args.eval_batch_size != args.train_batch_size
        for model in (named["model"], *self._companions):
            foresee(model, sizes)
        settle_optimizer(named.get("optimizer"), named["model"], self.config)
        self._leave_backward()  # of a training that was broken off
        self._in_backward = record_step_in_backward(args, named.get("optimizer"), named["model"], self.config)
        self._activations = record_activations(named["model"], self.config)
        report = self.metrics.report = report_of(named["model"], self.config)
        report.series.clear()  # of a training before
        record_load_balancing(report, self.config, named.get("train_dataloader"), args.world_size)
        if self.config.density.inspect:
            every, level = self.config.density.inspect_every, self.config.observe.log_level
            self._inspector = inspector_of(named["model"]) or DensityInspector(report, every, level)
            self._inspector.is_fed = True
        path = self.config.observe.report_file
        if path is not None:
            self._file = report_file_of(named["model"]) or ReportFile(report, path)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take what watches the model off it again, and write the report."""
        self._leave_backward()
        if self._activations is not None:
            self._activations.unsubscribe()
            self._activations = None
        self.metrics.take()
        if self._inspector is not None:
            self._inspector.settle()
            self._inspector.is_fed = False
        if self._file is not None:
            self._file.write()

    def _leave_backward(self) -> None:
        if self._in_backward is not None:
            self._in_backward.remove()
            self._in_backward = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock of an optimizer step."""
        self.metrics.begin_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Stop the clock."""
        self.metrics.end_step(state.global_step)

    def see(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Look at a batch that is about to be trained on, with all that the Trainer has of it."""
        self.metrics.see(inputs)
        if self._inspector is not None:
            self._inspector.see(model, inputs)

    def accompany(self, model: nn.Module, companion: nn.Module) -> None:
        """Run a model on ONNX Runtime, too, that is evaluated beside the one that is trained."""
        name = f"companion_{len(self._companions)}"
        if companion is not model and accelerate_companion(companion, self.config, name):
            self._companions.add(companion)
            kind = type(companion).__name__
            report_of(model, self.config).note(f"a {kind} that is only evaluated beside this model runs there, too")

    @property
    def where(self) -> Literal["loggers", "history", "none"]:
        """Which parts of the training log have the figures."""
        return self.config.observe.metrics

    def figures(self) -> dict[str, float]:
        """The numbers since the last line of the log."""
        values = self.metrics.take()
        if values and self._inspector is not None:
            self._inspector.settle()
            values |= self._inspector.needed()
        return values
