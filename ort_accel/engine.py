"""The verbs: accelerate a model in place, read or save its report, and restore it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ort_accel.capture.dynamic_shapes import ForeseenSizes
from ort_accel.compiler.backend import Backend
from ort_accel.compiler.device_placement import device_of
from ort_accel.compiler.layer_by_layer import LayeredCall, describe_layers, is_sharded, layers_of
from ort_accel.compiler.module_call import CompiledCall, ModelCall, OutsideLoss
from ort_accel.compiler.settings import resolve
from ort_accel.config import Config, load_config
from ort_accel.config.load import ConfigSource as ConfigSource
from ort_accel.errors import OrtAccelError
from ort_accel.observe.density import DensityInspector
from ort_accel.observe.logs import LOG, configure
from ort_accel.observe.report_file import ReportFile
from ort_accel.observe.report_file import save_report as write_report
from ort_accel.reporting.report import Report

Model = TypeVar("Model", bound=nn.Module)

_DECLINED_REPORTS: WeakKeyDictionary[nn.Module, Report] = WeakKeyDictionary()
"""The reports of models that were to be accelerated and could not be."""


def accelerate(model: Model, config: ConfigSource = None) -> Model:
    """Let a model run its forward and backward on ONNX Runtime, in place; returns the same model.

    Its class, its `state_dict` and its `forward` stay what they are. Calling it again with an equal configuration
    changes nothing; with another one, or on another device, the model is set up anew.
    """
    settings = config if isinstance(config, Config) else load_config(config)
    _refuse_unsupported(model)
    device, shards = device_of(model), is_sharded(model)
    present = call_of(model)
    if present is not None and runs_by_layers(model) is shards and present.backend.serves(settings, device):
        return model
    restore(model)
    if settings.engine.enabled and shards:
        layers = layers_of(model)
        accelerate_layers(model, settings, layers)
        report(model).note(f"FSDP2 shards this model, and {describe_layers(layers)} run on ONNX Runtime one by one")
    elif settings.engine.enabled:
        model._compiled_call_impl = CompiledCall(model, Backend(resolve(settings, device), Report()))
    return model


def accelerate_layers(
    model: Model,
    config: Config,
    layers: Sequence[nn.Module],
    undo: Callable[[], None] = lambda: None,
    zero3: bool = False,
) -> Model:
    """Let these layers of a model run on ONNX Runtime, each by itself, with Python between them; in place.

    Used for parameters that exist only while their layer runs: by FSDP2 or, with `zero3`, by ZeRO stage 3.
    Layers that are alike share compiled graphs. `undo` is called when the model is restored.
    """
    _refuse_unsupported(model)
    device = device_of(model)
    restore(model)
    backend = Backend(resolve(config, device, parameters_stay=False, zero3=zero3, sees_steps=False), Report())
    if config.compute.loss_only == "auto":
        backend.report.off("compute.loss_only", "layers run one by one, and none gives logits beside a loss")
    model._compiled_call_impl = LayeredCall(model, backend, layers, undo)
    return model


def restore(model: Model) -> Model:
    """Make an accelerated model plain PyTorch again; returns the same model. A plain model stays as it is."""
    call = call_of(model)
    if call is not None:
        call.release()
        model._compiled_call_impl = None
    return model


def decline(model: Model, config: Config, reason: str) -> Model:
    """Leave a model plain PyTorch, with the reason in its report and in the log; an error if `fallback` is `error`."""
    if config.engine.fallback == "error":
        raise OrtAccelError(
            f"engine.fallback is error, and this {type(model).__name__} cannot be accelerated: {reason}"
        )
    restore(model)
    declined = _DECLINED_REPORTS.setdefault(model, Report())
    declined.refused("engine", reason)
    configure(config.observe.log_level)
    LOG.warning("this %s stays plain PyTorch: %s", type(model).__name__, reason)
    return model


def config_of(model: nn.Module) -> Config | None:
    """Returns the configuration that an accelerated model runs with; None for any other model."""
    call = call_of(model)
    return None if call is None else call.backend.config


def runs_by_layers(model: nn.Module) -> bool:
    """True if a model is accelerated layer by layer."""
    return isinstance(call_of(model), LayeredCall)


def foresee(model: nn.Module, sizes: ForeseenSizes) -> None:
    """Tell an accelerated model the sizes of the batches to come, so that it compiles for them at once."""
    call = call_of(model)
    if call is not None:
        call.foresee(sizes)


def take_over(model: nn.Module, call: ModelCall, config: Config) -> bool:
    """Move the compiled graphs of another model to this one, and make the other one plain PyTorch.

    Returns False if that cannot be: the model must be of the same class, on the same device, and plain so far.
    """
    _refuse_unsupported(model)
    is_plain = call_of(model) is None and not is_sharded(model)
    return is_plain and call.backend.serves(config, device_of(model)) and call.take_over(model)


def recapture(model: nn.Module) -> None:
    """Drop the compiled graphs of an accelerated model, since its hooks changed. A plain model stays as it is."""
    call = call_of(model)
    if call is not None:
        model._compiled_call_impl = call.anew(model)


def report(model: nn.Module) -> Report:
    """Returns the report of an accelerated model: features applied and refused, and who ran which operators."""
    call = call_of(model)
    if call is None and model in _DECLINED_REPORTS:
        return _DECLINED_REPORTS[model]
    if call is None:
        raise OrtAccelError(f"this {type(model).__name__} is not accelerated; call ort_accel.accelerate(model) first")
    return call.backend.report


def save_report(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the report of an accelerated model as it is now, whole or not at all: `.json` for machines, `.html` for
    people, as one page that needs no network, `.png` for the plots of memory alone."""
    write_report(report(model), path)


def report_file_of(model: nn.Module) -> ReportFile | None:
    """Returns the file that `observe.report_file` names for an accelerated model; None for any other model."""
    call = call_of(model)
    return None if call is None else call.backend.report_file


def together_with(model: nn.Module, loss: OutsideLoss) -> AbstractContextManager[None]:
    """Within this context, the next call of an accelerated model computes this loss in its graph, if possible."""
    call = call_of(model)
    return nullcontext() if call is None else call.together_with(loss)


def inspector_of(model: nn.Module) -> DensityInspector | None:
    """Returns the inspector of an accelerated model's batches; None unless `density.inspect` is set."""
    call = call_of(model)
    return None if call is None else call.backend.inspector


def call_of(model: nn.Module) -> ModelCall | None:
    """Returns the call that an accelerated model runs; None for any other model."""
    call = model._compiled_call_impl
    return call if isinstance(call, ModelCall) else None


def _refuse_unsupported(model: nn.Module) -> None:
    """Raise a clear error for a model that cannot be accelerated, before anything is changed."""
    if not isinstance(model, nn.Module):
        raise OrtAccelError(f"accelerate takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, OptimizedModule):
        raise OrtAccelError("this model is wrapped by torch.compile; give accelerate the model inside it")
    if isinstance(model, nn.DataParallel):
        raise OrtAccelError("nn.DataParallel copies the model for every step; use DistributedDataParallel instead")
    if model._compiled_call_impl is not None and call_of(model) is None:
        raise OrtAccelError("model.compile() was called on this model; it cannot run on two compilers at once")
