"""Hugging Face training on ONNX Runtime: an unchanged model, set up by one YAML file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ort_accel.config import Config, load_config
    from ort_accel.engine import accelerate, report, restore, save_report
    from ort_accel.errors import ConfigError, OrtAccelError

__version__ = "0.2.0"

_HOMES = {
    "Config": "ort_accel.config",
    "ConfigError": "ort_accel.errors",
    "OrtAccelError": "ort_accel.errors",
    "accelerate": "ort_accel.engine",
    "load_config": "ort_accel.config",
    "report": "ort_accel.engine",
    "restore": "ort_accel.engine",
    "save_report": "ort_accel.engine",
}

__all__ = [
    "Config",
    "ConfigError",
    "OrtAccelError",
    "__version__",
    "accelerate",
    "load_config",
    "report",
    "restore",
    "save_report",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that `import ort_accel` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ort_accel' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
