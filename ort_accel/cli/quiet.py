"""Commands that run a few steps of their own, and show the report or compare the times themselves."""

from __future__ import annotations

from ort_accel.config import Config


def quiet(config: Config) -> Config:
    """The same configuration with every step on the engine; where nothing else is asked for, only errors are logged."""
    engine = config.engine.model_copy(update={"compare_with_eager": False})
    level = "error" if config.observe.log_level == "warning" else config.observe.log_level
    observe = config.observe.model_copy(update={"log_level": level})
    return config.model_copy(update={"engine": engine, "observe": observe})
