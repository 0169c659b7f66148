"""What is going on while a model is set up, and the feature table once its first step is over."""

from __future__ import annotations

import sys
import threading

from rich.console import Console
from rich.status import Status

from ort_accel.observe.feature_table import print_feature_table
from ort_accel.observe.logs import LOG, speaks
from ort_accel.reporting import Report

PATIENCE = 2.0
"""Seconds of set-up after which a terminal shows that something is going on."""

_WITH_PROGRESS = ("verbose", "devinfo", "info")
_WITH_TABLE = (*_WITH_PROGRESS, "warning")


class Progress:
    """Watches a report being written, as loudly as a log level allows."""

    def __init__(self, report: Report, log_level: str) -> None:
        self._report, self._level = report, log_level
        self._depth, self._text = 0, ""
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._status: Status | None = None
        self._table_due = log_level in _WITH_TABLE and speaks(log_level)
        report.watchers.append(self)

    def begin(self, phase: str, graph: str) -> None:
        """Say in the log, or soon on the terminal, what is being done."""
        self._depth += 1
        self._text = f"{graph}: {phase}" if graph else phase
        LOG.info(self._text)
        if self._status is not None:
            self._status.update(self._line())
        elif self._depth == 1 and self._wants_status():
            self._timer = threading.Timer(PATIENCE, self._show_status)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """Take the line off the terminal when everything is done."""
        with self._lock:
            self._depth -= 1
            if self._depth or self._timer is None:
                return
            self._timer.cancel()
            if self._status is not None:
                self._status.stop()
            self._timer = self._status = None

    def call(self) -> None:
        """A model is called: if it was trained in a step before, the report is complete enough to be shown once."""
        if self._table_due and any(segment.graph.startswith("backward") for segment in self._report.segments):
            self._table_due = False
            print_feature_table(self._report, everything=self._level in _WITH_PROGRESS, stderr=True)

    def _wants_status(self) -> bool:
        return self._level == "warning" and sys.stderr.isatty() and speaks(self._level)

    def _show_status(self) -> None:
        with self._lock:
            if self._depth:
                self._status = Console(stderr=True).status(self._line())
                self._status.start()

    def _line(self) -> str:
        return f"ort_accel sets up the model: {self._text}"
