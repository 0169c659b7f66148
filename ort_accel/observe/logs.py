"""`observe.log_level`: the level of each process. It affects the logger `ort_accel` only."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

LOG = logging.getLogger("ort_accel")

_LEVELS = {
    "verbose": logging.DEBUG,
    "devinfo": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_ORT_SEVERITIES = {"verbose": 0, "devinfo": 1, "info": 2, "warning": 3, "error": 3, "fatal": 4}
_EVERY_RANK = ("verbose", "devinfo")
_SILENT = logging.CRITICAL + 1
_ORT_SILENT = 4


def rank() -> int:
    """Returns the rank of this process; 0 if it trains alone."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    given = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    return int(given) if given.isdecimal() else 0


def speaks(log_level: str) -> bool:
    """True if this process logs at all: every rank does below `info`, otherwise only the first."""
    return log_level in _EVERY_RANK or rank() == 0


def severity(log_level: str) -> int:
    """Returns ONNX Runtime's log severity, which is one step quieter than ort_accel's own."""
    return _ORT_SEVERITIES[log_level] if speaks(log_level) else _ORT_SILENT


def configure(log_level: str) -> None:
    """Set the level of the logger `ort_accel`, and give it a handler once."""
    LOG.setLevel(_LEVELS[log_level] if speaks(log_level) else _SILENT)
    if not any(isinstance(handler, _ToStandardError) for handler in LOG.handlers):
        LOG.addHandler(_ToStandardError())


def say(text: str) -> None:
    """Log a line that is no warning, at every level that lets warnings through."""
    if LOG.isEnabledFor(logging.WARNING):
        record = LOG.makeRecord(LOG.name, logging.INFO, __file__, 0, text, (), None, extra={_SAID: True})
        LOG.handle(record)


_SAID = "without_level"
"""Attribute of a record that is shown without its level."""


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if hasattr(record, _SAID) else f"{record.levelname}: "
        return f"ort_accel: {level}{super().format(record)}"


class _ToStandardError(logging.StreamHandler[TextIO]):
    """Writes to the current standard error, unless the program has set up logging of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Format())

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore the stream, since the current standard error counts."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)
