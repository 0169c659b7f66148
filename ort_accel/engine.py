"""The verbs: accelerate a model in place, read or save its report, and restore it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ort_accel.capture.dynamic_shapes import Foreseen
from ort_accel.compiler.backend import Backend
from ort_accel.compiler.device_placement import device_of
from ort_accel.compiler.layer_by_layer import LayeredCall, is_sharded, kinds_of, layers_of
from ort_accel.compiler.module_call import CompiledCall, ModelCall, OutsideLoss
from ort_accel.compiler.settings import resolve
from ort_accel.config import Config, load_config
from ort_accel.errors import OrtAccelError
from ort_accel.observe.density import DensityInspector
from ort_accel.observe.logs import LOG, configure
from ort_accel.observe.report_file import ReportFile
from ort_accel.observe.report_file import save_report as write_report
from ort_accel.reporting import Report

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config | None

Model = TypeVar("Model", bound=nn.Module)

_DECLINED: WeakKeyDictionary[nn.Module, Report] = WeakKeyDictionary()
"""The reports of models that were to be accelerated and could not be."""


def accelerate(model: Model, config: ConfigSource = None) -> Model:
    """Let a model run its forward and backward on ONNX Runtime, in place; returns the same model.

    Its class, its `state_dict` and its `forward` stay what they are. Calling it again with an equal configuration
    changes nothing; with another one, or on another device, the model is set up anew.
    """
    settings = config if isinstance(config, Config) else load_config(config)
    _refuse(model)
    device, shards = device_of(model), is_sharded(model)
    present = call_of(model)
    if present is not None and runs_by_layers(model) is shards and present.backend.serves(settings, device):
        return model
    restore(model)
    if settings.engine.enabled and shards:
        layers = layers_of(model)
        accelerate_layers(model, settings, layers)
        report(model).note(f"FSDP2 shards this model, and {kinds_of(layers)} run on ONNX Runtime one by one")
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

    For parameters that are only there while their layer runs, be it by FSDP2 or, if `zero3` says so, by ZeRO stage 3.
    Layers that are alike share what is compiled. `undo` is called when the model is restored.
    """
    _refuse(model)
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
    """Leave a model plain PyTorch and say why, in its report and in the log; an error where `fallback` is `error`."""
    if config.engine.fallback == "error":
        raise OrtAccelError(
            f"engine.fallback is error, and this {type(model).__name__} cannot be accelerated: {reason}"
        )
    restore(model)
    declined = _DECLINED.setdefault(model, Report())
    declined.refused("engine", reason)
    configure(config.observe.log_level)
    LOG.warning("this %s stays plain PyTorch: %s", type(model).__name__, reason)
    return model


def config_of(model: nn.Module) -> Config | None:
    """The configuration that an accelerated model runs with; None for any other model."""
    call = call_of(model)
    return None if call is None else call.backend.config


def runs_by_layers(model: nn.Module) -> bool:
    """Whether a model is accelerated layer by layer."""
    return isinstance(call_of(model), LayeredCall)


def foresee(model: nn.Module, sizes: Foreseen) -> None:
    """Tell an accelerated model what is known about the batches to come, so that it compiles for them at once."""
    call = call_of(model)
    if call is not None:
        call.foresee(sizes)


def take_over(model: nn.Module, call: ModelCall, config: Config) -> bool:
    """Accelerate a model with what was compiled for another one of its kind, which is plain PyTorch from now on.

    Says whether that can be: the model must be of the same class, on the same device, and plain so far.
    """
    _refuse(model)
    is_plain = call_of(model) is None and not is_sharded(model)
    return is_plain and call.backend.serves(config, device_of(model)) and call.take_over(model)


def recapture(model: nn.Module) -> None:
    """Forget what was compiled for an accelerated model, since its hooks changed. A plain model stays as it is."""
    call = call_of(model)
    if call is not None:
        model._compiled_call_impl = call.anew(model)


def report(model: nn.Module) -> Report:
    """What was applied to an accelerated model, what was refused and why, and what ran where."""
    call = call_of(model)
    if call is None and model in _DECLINED:
        return _DECLINED[model]
    if call is None:
        raise OrtAccelError(f"this {type(model).__name__} is not accelerated; call ort_accel.accelerate(model) first")
    return call.backend.report


def save_report(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the report of an accelerated model as it is now, whole or not at all: `.json` for machines, `.html` for
    people, as one page that needs no network, `.png` for the plots of memory alone."""
    write_report(report(model), path)


def report_file_of(model: nn.Module) -> ReportFile | None:
    """The file that `observe.report_file` names for an accelerated model; None for any other model."""
    call = call_of(model)
    return None if call is None else call.backend.report_file


def together_with(model: nn.Module, loss: OutsideLoss) -> AbstractContextManager[None]:
    """While this is entered, the next call of an accelerated model computes this loss with it, where that can be."""
    call = call_of(model)
    return nullcontext() if call is None else call.together_with(loss)


def inspector_of(model: nn.Module) -> DensityInspector | None:
    """What looks at the batches of an accelerated model, where `density.inspect` asks for it."""
    call = call_of(model)
    return None if call is None else call.backend.inspector


def call_of(model: nn.Module) -> ModelCall | None:
    """What an accelerated model runs when it is called; None for any other model."""
    call = model._compiled_call_impl
    return call if isinstance(call, ModelCall) else None


def _refuse(model: nn.Module) -> None:
    """Say clearly what cannot be accelerated, before anything is changed."""
    if not isinstance(model, nn.Module):
        raise OrtAccelError(f"accelerate takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, OptimizedModule):
        raise OrtAccelError("this model is wrapped by torch.compile; give accelerate the model inside it")
    if isinstance(model, nn.DataParallel):
        raise OrtAccelError("nn.DataParallel copies the model for every step; use DistributedDataParallel instead")
    if model._compiled_call_impl is not None and call_of(model) is None:
        raise OrtAccelError("model.compile() was called on this model; it cannot run on two compilers at once")
