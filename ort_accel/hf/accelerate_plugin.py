"""ort_accel for scripts with an `accelerate.Accelerator`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from accelerate import Accelerator
from accelerate.state import is_initialized
from accelerate.utils import TorchDynamoPlugin

from ort_accel.config import Config, load_config
from ort_accel.errors import OrtAccelError
from ort_accel.hf.accelerate_hooks import hook_accelerators
from ort_accel.hf.activation import CONFIG_VARIABLE, ConfigSource, usable_config


class ORTAccelPlugin(TorchDynamoPlugin):  # type: ignore[misc]
    """Runs what an Accelerator prepares on ONNX Runtime: `Accelerator(dynamo_plugin=ORTAccelPlugin("x.yaml"))`.

    It stands in the place of accelerate's own compiler settings, since a model has one compiler. But nothing is
    wrapped: `prepare` gives back the same model (or DDP around it), with the same `state_dict` and checkpoints.

    Sections given by name lie over the file, as in `ORTAccelPlugin("x.yaml", engine={"fallback": "error"})`. Without a
    file, the one in the environment variable `ORT_ACCEL_CONFIG` counts, and without that the defaults.
    """

    of_the_launch: ClassVar[Config | None] = None
    """What counts for an Accelerator without this plugin, in a script that `ort_accel.run` runs."""

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
    """Let every Accelerator of this process run its models on ONNX Runtime, as this file says or the defaults.

    What the script itself asks for goes first: a plugin or trainer without a file of its own takes this one.
    """
    config = usable_config(config_file)
    if config_file is not None:
        os.environ[CONFIG_VARIABLE] = str(Path(config_file).absolute())
    ORTAccelPlugin.of_the_launch = config
    hook_accelerators(_config_of)


def _config_of(accelerator: Accelerator) -> Config | None:
    plugin = accelerator.state.dynamo_plugin
    return plugin.config if isinstance(plugin, ORTAccelPlugin) else ORTAccelPlugin.of_the_launch


def _with_sections(config: Config, sections: Mapping[str, Any]) -> Config:
    return usable_config(load_config(_laid_over(config.to_dict(), sections))) if sections else config


def _laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _laid_over(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
