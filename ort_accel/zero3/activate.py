"""Activation of a partitioned model, and the reasons for which it stays with PyTorch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from torch import nn

from ort_accel import engine
from ort_accel.compiler.layer_by_layer import describe_layers, layers_of
from ort_accel.config import Config
from ort_accel.zero3.deepspeed_interfaces import (
    SUPPORTED_VERSIONS,
    ZeroOptimizer,
    capture_plain_linear,
    missing_interfaces,
    parameters_of,
)
from ort_accel.zero3.layer_gathering import LayerGathering

FEATURE = "distributed.zero3"


def accelerate_partitioned(model: nn.Module, config: Config, zero: ZeroOptimizer) -> None:
    """Run a model under ZeRO stage 3 on the engine, in place; a model that cannot stays plain and reports the reason.

    `zero` is the result of `zero_optimizer_in`. A second call with an equal configuration changes nothing.
    """
    if engine.runs_by_layers(model) and engine.config_of(model) == config:
        return
    engine.restore(model)
    layers = layers_of(model)
    reason = _reason_to_decline(config, zero, layers)
    if reason:
        engine.decline(model, config, f"ZeRO stage 3 shards it, and {reason}")
        return
    capture_plain_linear()
    largest = max(sum(parameter.ds_numel for parameter in parameters_of(layer)) for layer in layers)
    gathering = LayerGathering(zero, layers, largest)
    engine.accelerate_layers(model, config, layers, undo=gathering.undo, zero3=True)
    how = f"{describe_layers(layers)} are gathered one by one, and one ahead"
    engine.report(model).applied(FEATURE, f"{how}; the largest has {largest:,} parameters")


def _reason_to_decline(config: Config, zero: ZeroOptimizer, layers: Sequence[nn.Module]) -> str:
    """Returns why a partitioned model stays with PyTorch; empty where it can run on the engine."""
    if config.distributed.zero3 is False:
        return f"{FEATURE} is false"
    version = importlib.metadata.version("deepspeed")
    if version not in SUPPORTED_VERSIONS:
        return f"its layers need deepspeed {SUPPORTED_VERSIONS}, not {version}"
    missing = missing_interfaces(zero, layers)
    if missing:
        return f"this deepspeed {version} lacks {', '.join(missing)}"
    if not layers:
        return "it has no layers that could be gathered one by one"
    leaves = {type(part).__name__ for layer in layers for part in layer.modules() if getattr(part, "_z3_leaf", False)}
    if leaves:
        return f"DeepSpeed was told to gather {', '.join(sorted(leaves))} in its own way"
    return ""
