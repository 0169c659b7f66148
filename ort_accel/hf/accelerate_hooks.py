"""Hooks on private methods of `accelerate.Accelerator`; checked with accelerate 1.10 and 1.15, and DeepSpeed 0.19.8.

Plain and data-parallel models go through `prepare_model`; DeepSpeed, FSDP2 and Megatron-LM have methods of their own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from accelerate import Accelerator
from accelerate.utils import DistributedType, extract_model_from_parallel, model_has_dtensor
from torch import nn
from torch.utils.data import DataLoader

from ort_accel import engine
from ort_accel.capture.dynamic_shapes import ForeseenSizes
from ort_accel.compiler.layer_by_layer import is_sharded
from ort_accel.config import Config
from ort_accel.errors import OrtAccelError
from ort_accel.hf.batch_shapes import shapes_of_batches
from ort_accel.zero3 import accelerate_partitioned, is_partitioned, zero_optimizer_in

ConfigOf = Callable[[Accelerator], Config | None]
"""Returns the configuration for the models of an Accelerator; None leaves them plain."""

_HOOKED = "_ort_accel_config_of"

_PREPARED: WeakKeyDictionary[Accelerator, tuple[ForeseenSizes, WeakSet[nn.Module]]] = WeakKeyDictionary()
"""The batch shapes and models that each Accelerator has prepared. They stand here since Accelerators are pickled."""

_GATHERING_CODE = (
    "its parameters are gathered and freed by Python code between its parts, which this version of ort_accel follows "
    "under FSDP2 and ZeRO stage 3 only"
)


def hook_accelerators(config_of: ConfigOf) -> None:
    """Accelerate the models that Accelerators of this process prepare. A later call replaces `config_of`."""
    first = not hasattr(Accelerator, _HOOKED)
    setattr(Accelerator, _HOOKED, staticmethod(config_of))
    if first:
        _wrap("prepare_model", _prepare_model)
        _wrap("prepare_data_loader", _prepare_data_loader)
        for name in ("_prepare_deepspeed", "_prepare_fsdp2", "_prepare_megatron_lm"):
            _wrap(name, _prepare_together)


def _wrap(name: str, wrapper: Callable[..., object]) -> None:
    original = getattr(Accelerator, name, None)
    if original is None:
        raise OrtAccelError(
            f"accelerate has no Accelerator.{name} any more, so that models cannot be reached; install accelerate 1.15"
        )

    @functools.wraps(original)
    def method(self: Accelerator, *args: object, **kwargs: object) -> object:
        config = getattr(self, _HOOKED)(self)
        if config is None or not config.engine.enabled:
            return original(self, *args, **kwargs)
        return wrapper(self, config, functools.partial(original, self), *args, **kwargs)

    setattr(Accelerator, name, method)


def _prepare_model(
    accelerator: Accelerator,
    config: Config,
    original: Callable[..., nn.Module],
    model: nn.Module,
    *args: object,
    **kwargs: object,
) -> nn.Module:
    """Let accelerate move and wrap a model, then accelerate the inner model."""
    _refuse_device(accelerator)
    prepared = original(model, *args, **kwargs)
    inner = extract_model_from_parallel(prepared)
    _accelerate_once(inner, config, _reason_to_decline(accelerator, model))
    _share_shapes(accelerator, ForeseenSizes(), inner)
    return prepared


def _prepare_data_loader(
    accelerator: Accelerator,
    _: Config,
    original: Callable[..., DataLoader[object]],
    *args: object,
    **kwargs: object,
) -> DataLoader[object]:
    """Let accelerate prepare a data loader, then tell the models the shapes of its batches."""
    prepared = original(*args, **kwargs)
    _share_shapes(accelerator, shapes_of_batches(prepared))
    return prepared


def _share_shapes(accelerator: Accelerator, shapes: ForeseenSizes, *models: nn.Module) -> None:
    """Merge the known batch shapes, and pass them to all prepared models; models and loaders come in any order."""
    known, prepared = _PREPARED.setdefault(accelerator, (ForeseenSizes(), WeakSet()))
    known.add(shapes)
    prepared.update(models)
    for model in prepared:
        engine.foresee(model, known)


def _prepare_together(
    accelerator: Accelerator, config: Config, original: Callable[..., tuple[object, ...]], *objects: object
) -> tuple[object, ...]:
    """Let accelerate prepare a model and its optimizer together, in place, then accelerate the model."""
    _refuse_device(accelerator)
    prepared = original(*objects)
    for model in objects:
        if isinstance(model, nn.Module) and is_partitioned(model):
            accelerate_partitioned(model, engine.config_of(model) or config, zero_optimizer_in(*prepared))
            _share_shapes(accelerator, ForeseenSizes(), model)
        elif isinstance(model, nn.Module):
            _accelerate_once(extract_model_from_parallel(model), config, _reason_to_decline(accelerator, model))
            _share_shapes(accelerator, ForeseenSizes(), extract_model_from_parallel(model))
            if engine.config_of(model) is not None:
                move_hooks_to_engine(model, prepared)
    return prepared


def move_hooks_to_engine(model: nn.Module, prepared: tuple[Any, ...]) -> None:
    """Move timers and casts from the model to DeepSpeed's engine, since hooks on the model would break its graph."""
    for deepspeed in prepared:
        if getattr(deepspeed, "module", None) is model and hasattr(deepspeed, "_forward_prologue"):
            deepspeed.module_forward_pre_hook.remove()
            deepspeed.module_forward_post_hook.remove()
            deepspeed.register_forward_pre_hook(
                lambda called, args, kwargs: called._forward_prologue(args, kwargs), with_kwargs=True
            )
            deepspeed.register_forward_hook(lambda called, *_: called._forward_epilogue())


def _reason_to_decline(accelerator: Accelerator, model: nn.Module) -> str:
    """Returns why a model cannot be accelerated; empty if it can."""
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        return "Megatron-LM builds another model in its place"
    if not is_sharded(model) and (accelerator.distributed_type == DistributedType.FSDP or model_has_dtensor(model)):
        return f"it is sharded, and {_GATHERING_CODE}"
    return ""


def _accelerate_once(model: nn.Module, config: Config, reason: str) -> None:
    """Accelerate a model, unless there is a reason not to, or the script did so itself with its own configuration."""
    present = engine.config_of(model)
    if reason:
        engine.decline(model, config, reason)
    elif present is None or is_sharded(model):  # it may have been accelerated as a whole before it was sharded
        engine.accelerate(model, present or config)
        _save_atomically_in_trainers()
    elif present != config:
        engine.report(model).note("the script chose a configuration for this model, and that of the launch is not used")


def _save_atomically_in_trainers() -> None:
    """Make checkpoints atomic in scripts that use a Trainer without our callback."""
    if "transformers.trainer" in sys.modules:
        from ort_accel.hf.trainer_hooks import save_accelerated_atomically

        save_accelerated_atomically()


def _refuse_device(accelerator: Accelerator) -> None:
    if accelerator.device.type == "mps":
        raise OrtAccelError(
            "accelerate puts models on mps here, and no ONNX Runtime trains there; choose the CPU: "
            "`ort-accel launch --cpu`, `Accelerator(cpu=True)`, or `use_cpu=True` in TrainingArguments"
        )
