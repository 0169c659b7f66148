"""The plugin for scripts with an `accelerate.Accelerator`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from accelerate import Accelerator
from accelerate.state import is_initialized
from accelerate.utils import TorchDynamoPlugin

from ort_accel.config import Config, load_config
from ort_accel.config.load import ConfigSource
from ort_accel.errors import OrtAccelError
from ort_accel.hf.accelerate_hooks import hook_accelerators
from ort_accel.hf.activation import CONFIG_VARIABLE, usable_config


class ORTAccelPlugin(TorchDynamoPlugin):  # type: ignore[misc]
    """Runs the models of an Accelerator on ONNX Runtime: `Accelerator(dynamo_plugin=ORTAccelPlugin("x.yaml"))`.

    It replaces accelerate's compiler settings, since a model has one compiler. Nothing is wrapped: `prepare` returns
    the same model, or DDP around it, with the same `state_dict` and checkpoints.

    Sections override the file, as in `ORTAccelPlugin("x.yaml", engine={"fallback": "error"})`. The file defaults to the
    one in the environment variable `ORT_ACCEL_CONFIG`, and to the default configuration without it.
    """

    launch_config: ClassVar[Config | None] = None
    """The configuration of Accelerators without this plugin, in a script that `ort_accel.run` runs."""

    def __init__(self, config: ConfigSource = None, **sections: Mapping[str, Any]) -> None:
        if is_initialized():
            raise OrtAccelError(
                "accelerate takes plugins from the first Accelerator of a process only, and one was made before this "
                "ORTAccelPlugin; give it to the first one, or call ort_accel.accelerate(model, config) before prepare"
            )
        super().__init__(backend="no")
        self.config = _with_sections(usable_config(config), sections)
        hook_accelerators(_config_of)


def accelerate_all_models(config_file: str | None) -> None:
    """Let every Accelerator of this process run its models on ONNX Runtime, by this file or by the script's own."""
    config = usable_config(config_file)
    if config_file is not None:
        os.environ[CONFIG_VARIABLE] = str(Path(config_file).absolute())
    ORTAccelPlugin.launch_config = config
    hook_accelerators(_config_of)


def _config_of(accelerator: Accelerator) -> Config | None:
    plugin = accelerator.state.dynamo_plugin
    return plugin.config if isinstance(plugin, ORTAccelPlugin) else ORTAccelPlugin.launch_config


def _with_sections(config: Config, sections: Mapping[str, Any]) -> Config:
    return usable_config(load_config(_merged(config.to_dict(), sections))) if sections else config


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
