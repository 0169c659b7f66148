"""From a configuration to a model that runs on ONNX Runtime, for everything in this room."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

import ort_accel
from ort_accel import engine
from ort_accel.compiler.module_call import ModelCall
from ort_accel.compiler.refusals import refuse_unsupported
from ort_accel.config import Config, load_config
from ort_accel.errors import OrtAccelError
from ort_accel.hf.fused_head import write_out_heads
from ort_accel.reporting import Report
from ort_accel.subscribers.zero_offload import accelerate_partitioned, is_partitioned, zero_in

if TYPE_CHECKING:
    from torch import nn

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config | None
"""A YAML file, the same as a dict, a finished configuration, or None for the defaults."""

CONFIG_VARIABLE = "ORT_ACCEL_CONFIG"
"""The environment variable that names the YAML file where a script names none."""


def usable_config(source: ConfigSource) -> Config:
    """Load a configuration and refuse what it asks for and nobody would do, before anything is built.

    Without a source, the file that the environment names counts: `ort-accel launch` names its own there.
    """
    config = load_config(os.environ.get(CONFIG_VARIABLE) or None if source is None else source)
    refuse_unsupported(config)
    return config


def activate(model: nn.Module, config: Config, optimizer: Any = None, earlier: ModelCall | None = None) -> None:
    """Run a model as the configuration says, in place. A second call changes nothing.

    Where `earlier` served a model of the same kind, this one has what was compiled then. Under ZeRO stage 3 nothing is
    done before DeepSpeed has wrapped the optimizer, since only then layers can be told.
    """
    if not config.engine.enabled:
        return
    write_out_heads()
    if is_partitioned(model) and (zero := zero_in(optimizer)) is not None:
        accelerate_partitioned(model, config, zero)
    elif is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        return
    elif earlier is None or not engine.take_over(model, earlier, config):
        ort_accel.accelerate(model, config)


def report_of(model: nn.Module, config: Config) -> Report:
    """The report of a model that is trained; one that eager PyTorch trains has a report of its steps alone."""
    try:
        return ort_accel.report(model)
    except OrtAccelError as error:
        versions = {"ort_accel": ort_accel.__version__, "torch": str(torch.__version__)}
        report = Report(versions=versions, config=config.to_dict())
        report.off("engine", str(error) if config.engine.enabled else "engine.enabled is false")
        return report
