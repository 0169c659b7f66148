"""Commands that show a report themselves do not want it shown twice."""

from __future__ import annotations

from ort_accel.config import Config


def quiet(config: Config) -> Config:
    """The same configuration; where nothing else is asked for, errors alone are logged."""
    if config.observe.log_level != "warning":
        return config
    return config.model_copy(update={"observe": config.observe.model_copy(update={"log_level": "error"})})
