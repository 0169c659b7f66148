"""Loading of a configuration, and activation of a model on ONNX Runtime by it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

import ort_accel
from ort_accel import engine
from ort_accel.compiler.module_call import ModelCall
from ort_accel.compiler.refusals import refuse_unsupported
from ort_accel.config import Config
from ort_accel.config.load import ConfigSource, load_config
from ort_accel.errors import OrtAccelError
from ort_accel.hf.checkpointing_hooks import keep_hooks
from ort_accel.hf.fused_head import write_out_heads
from ort_accel.reporting.report import Report
from ort_accel.zero3 import accelerate_partitioned, is_partitioned, zero_optimizer_in

if TYPE_CHECKING:
    from torch import nn

CONFIG_VARIABLE = "ORT_ACCEL_CONFIG"
"""The environment variable that names the YAML file for a script that names none."""


def usable_config(source: ConfigSource) -> Config:
    """Load a configuration, by default the file that the environment names; raises if a feature is not available."""
    config = load_config(os.environ.get(CONFIG_VARIABLE) or None if source is None else source)
    refuse_unsupported(config)
    return config


def activate(model: nn.Module, config: Config, optimizer: object = None, earlier: ModelCall | None = None) -> None:
    """Run a model as the configuration says, in place. A second call changes nothing.

    The model takes over the compiled code of `earlier` if both are of the same kind. Under ZeRO stage 3 nothing is done
    before DeepSpeed has wrapped the optimizer, since that is needed to gather layers.
    """
    if not config.engine.enabled:
        return
    write_out_heads()
    keep_hooks()
    if is_partitioned(model) and (zero := zero_optimizer_in(optimizer)) is not None:
        accelerate_partitioned(model, config, zero)
    elif is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        return
    elif earlier is None or not engine.take_over(model, earlier, config):
        ort_accel.accelerate(model, config)


def report_of(model: nn.Module, config: Config) -> Report:
    """Returns the report of a model; a model in eager PyTorch gets a report of its steps only."""
    try:
        return ort_accel.report(model)
    except OrtAccelError as error:
        versions = {"ort_accel": ort_accel.__version__, "torch": str(torch.__version__)}
        report = Report(versions=versions, config=config.to_dict())
        report.off("engine", str(error) if config.engine.enabled else "engine.enabled is false")
        return report
