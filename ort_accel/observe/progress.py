"""Shows the phases of a model's set-up, and one line about the model after its first step."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from rich.console import Console
from rich.text import Text

from ort_accel.observe.feature_table import print_feature_table
from ort_accel.observe.headline import headline
from ort_accel.observe.logs import LOG, say, speaks
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report

STATUS_DELAY_SECONDS = 2.0
"""The seconds of set-up after which a terminal shows its phase."""

_WITH_TABLE = ("verbose", "devinfo", "info")
_WITH_LINE = ("warning",)


class Progress:
    """Listens to a report's phases, and shows them at the log level."""

    def __init__(self, report: Report, log_level: str) -> None:
        self._report, self._level = report, log_level
        self._depth, self._text, self._begun = 0, "", 0.0
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._shown = ExitStack()
        self._is_due = log_level in (*_WITH_TABLE, *_WITH_LINE) and speaks(log_level)
        report.watchers.append(self)

    def begin(self, phase: str, graph: str) -> None:
        """Log the phase, and show it on the terminal after a delay."""
        self._depth += 1
        self._text = f"{graph}: {phase}" if graph else phase
        LOG.info(self._text)
        if self._depth == 1 and self._wants_status():
            self._begun = time.monotonic()
            self._timer = threading.Timer(STATUS_DELAY_SECONDS, self._show_status)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """Remove the line from the terminal after the outermost phase."""
        with self._lock:
            self._depth -= 1
            if self._depth or self._timer is None:
                return
            self._timer.cancel()
            self._shown.close()
            self._timer = None

    def call(self) -> None:
        """Show the report once, at the first call of the model after a training step."""
        if self._is_due and self._has_trained():
            self._is_due = False
            if self._level in _WITH_TABLE:
                print_feature_table(self._report, stderr=True)
            else:
                say(headline(self._report))

    def _has_trained(self) -> bool:
        if any(segment.graph.startswith("backward") for segment in self._report.segments):
            return True
        return any(item.reason is Reason.NOT_COMPILED for item in self._report.fallbacks)

    def _wants_status(self) -> bool:
        return self._level == "warning" and sys.stderr.isatty() and speaks(self._level)

    def _show_status(self) -> None:
        with self._lock:
            if self._depth:
                console = Console(stderr=True)
                terminal = sys.stderr
                self._shown.enter_context(console.status(self))
                self._shown.enter_context(_written_above(terminal))

    def __rich__(self) -> Text:
        """Returns the current line; Rich calls it several times a second."""
        return Text(f"ort_accel sets up the model: {self._text}, {time.monotonic() - self._begun:.0f} s")


@contextmanager
def _written_above(terminal: TextIO) -> Iterator[None]:
    """Let log handlers that hold the terminal itself write above the line that Rich keeps at its end."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = {
        handler
        for logger in loggers
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is terminal
    }
    for handler in handlers:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(terminal)
