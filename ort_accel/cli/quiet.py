"""The configuration of commands that run a few steps, and show the report or the times themselves."""

from __future__ import annotations

from ort_accel.config import Config


def quiet(config: Config) -> Config:
    """Returns the configuration with every step on the engine; at the default log level, only errors are logged."""
    engine = config.engine.model_copy(update={"compare_with_eager": False})
    level = "error" if config.observe.log_level == "warning" else config.observe.log_level
    observe = config.observe.model_copy(update={"log_level": level})
    return config.model_copy(update={"engine": engine, "observe": observe})
