"""Where `accelerate.Accelerator` is hooked, which is private to accelerate; checked with accelerate 1.10 and 1.15.

Plain and data-parallel models pass through `prepare_model`, those of DeepSpeed, FSDP2 and Megatron-LM do not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from accelerate import Accelerator
from accelerate.utils import DistributedType, extract_model_from_parallel, model_has_dtensor
from torch import nn

from ort_accel import engine
from ort_accel.capture.dynamic_shapes import Foreseen
from ort_accel.compiler.layer_by_layer import is_sharded
from ort_accel.config import Config
from ort_accel.errors import OrtAccelError
from ort_accel.hf.deepspeed_hooks import move_hooks_out_of
from ort_accel.hf.foreseen_sizes import foreseen_in
from ort_accel.zero3 import accelerate_partitioned, is_partitioned, zero_optimizer_in

ConfigOf = Callable[[Accelerator], Config | None]
"""Which configuration the models of an Accelerator are to have; None leaves them alone."""

_HOOKED = "_ort_accel_config_of"
_FORESEEN = "_ort_accel_foreseen"

_BETWEEN_PARTS = (
    "its parameters are gathered and freed by Python code between its parts, which this version of ort_accel follows "
    "under FSDP2 and ZeRO stage 3 only"
)


def hook_accelerators(config_of: ConfigOf) -> None:
    """Accelerate the models that any Accelerator of this process prepares. A later call replaces `config_of`."""
    first = not hasattr(Accelerator, _HOOKED)
    setattr(Accelerator, _HOOKED, staticmethod(config_of))
    if first:
        _wrap("prepare_model", _prepare_model)
        _wrap("prepare_data_loader", _prepare_data_loader)
        for name in ("_prepare_deepspeed", "_prepare_fsdp2", "_prepare_megatron_lm"):
            _wrap(name, _prepare_together)


def _wrap(name: str, around: Callable[..., Any]) -> None:
    original = getattr(Accelerator, name, None)
    if original is None:
        raise OrtAccelError(
            f"accelerate has no Accelerator.{name} any more, so that models cannot be reached; install accelerate 1.15"
        )

    @functools.wraps(original)
    def method(self: Accelerator, *args: Any, **named: Any) -> Any:
        config = getattr(self, _HOOKED)(self)
        if config is None or not config.engine.enabled:
            return original(self, *args, **named)
        return around(self, config, functools.partial(original, self), *args, **named)

    setattr(Accelerator, name, method)


def _prepare_model(
    accelerator: Accelerator,
    config: Config,
    original: Callable[..., nn.Module],
    model: nn.Module,
    *args: Any,
    **how: Any,
) -> nn.Module:
    """Let accelerate move and wrap a model, then accelerate what is inside the wrapper."""
    _refuse_device(accelerator)
    prepared = original(model, *args, **how)
    inner = extract_model_from_parallel(prepared)
    _accelerate_once(inner, config, _reason_to_decline(accelerator, model))
    _foresee(accelerator, Foreseen(), inner)
    return prepared


def _prepare_data_loader(
    accelerator: Accelerator, _: Config, original: Callable[..., Any], loader: Any, *args: Any, **how: Any
) -> Any:
    """Let accelerate prepare a data loader, then tell models what its batches will be like."""
    prepared = original(loader, *args, **how)
    _foresee(accelerator, foreseen_in(prepared))
    return prepared


def _foresee(accelerator: Accelerator, sizes: Foreseen, *models: nn.Module) -> None:
    """Join what is known of batches, and tell it to all models that were prepared. They come in any order."""
    known, told = vars(accelerator).setdefault(_FORESEEN, (Foreseen(), WeakSet()))
    known.add(sizes)
    told.update(models)
    for model in told:
        engine.foresee(model, known)


def _prepare_together(accelerator: Accelerator, config: Config, original: Callable[..., Any], *objects: Any) -> Any:
    """The same for what prepares a model and its optimizer at once, in place."""
    _refuse_device(accelerator)
    prepared = original(*objects)
    for model in objects:
        if isinstance(model, nn.Module) and is_partitioned(model):
            accelerate_partitioned(model, engine.config_of(model) or config, zero_optimizer_in(*prepared))
            _foresee(accelerator, Foreseen(), model)
        elif isinstance(model, nn.Module):
            _accelerate_once(extract_model_from_parallel(model), config, _reason_to_decline(accelerator, model))
            _foresee(accelerator, Foreseen(), extract_model_from_parallel(model))
            if engine.config_of(model) is not None:
                move_hooks_out_of(model, prepared)
    return prepared


def _reason_to_decline(accelerator: Accelerator, model: nn.Module) -> str:
    """Why a model cannot be accelerated; empty where it can."""
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        return "Megatron-LM builds another model in its place"
    if not is_sharded(model) and (accelerator.distributed_type == DistributedType.FSDP or model_has_dtensor(model)):
        return f"it is sharded, and {_BETWEEN_PARTS}"
    return ""


def _accelerate_once(model: nn.Module, config: Config, reason: str) -> None:
    """Accelerate a model, unless it cannot be or the script did so itself: what a script chose stands."""
    present = engine.config_of(model)
    if reason:
        engine.decline(model, config, reason)
    elif present is None or is_sharded(model):  # it may have been captured as a whole before it was sharded
        engine.accelerate(model, present or config)
        _save_whole_in_trainers()
    elif present != config:
        engine.report(model).note("the script chose a configuration for this model, and that of the launch is not used")


def _save_whole_in_trainers() -> None:
    """A Trainer in an unchanged script has no callback of ours that would. Scripts without one need not import it."""
    if "transformers.trainer" in sys.modules:
        from ort_accel.hf.trainer_hooks import save_whole_what_is_accelerated

        save_whole_what_is_accelerated()


def _refuse_device(accelerator: Accelerator) -> None:
    if accelerator.device.type == "mps":
        raise OrtAccelError(
            "accelerate puts models on mps here, and no ONNX Runtime trains there; choose the CPU: "
            "`ort-accel launch --cpu`, `Accelerator(cpu=True)`, or `use_cpu=True` in TrainingArguments"
        )
