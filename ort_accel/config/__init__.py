"""The configuration: a typed object, the YAML that builds it, and errors with file, line and column."""

from ort_accel.config.load import load_config
from ort_accel.config.schema import Config
from ort_accel.errors import ConfigError, Problem

__all__ = ["Config", "ConfigError", "Problem", "load_config"]
