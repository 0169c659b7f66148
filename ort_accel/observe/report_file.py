"""Writes a report to a file, when training ends or on request."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from ort_accel.errors import OrtAccelError
from ort_accel.files import why_not_writable, write_aside
from ort_accel.observe.html_report import html_report
from ort_accel.observe.logs import LOG, rank
from ort_accel.observe.memory_plots import Data
from ort_accel.observe.memory_png import memory_png
from ort_accel.reporting.report import Report

KEY = "observe.report_file"
_WRITERS: dict[str, Callable[[Data], bytes]] = {
    ".json": lambda data: (json.dumps(data, indent=1) + "\n").encode(),
    ".html": lambda data: html_report(data).encode(),
    ".png": memory_png,
}


def save_report(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report, whole or not at all: `.json` for machines, `.html` for people, `.png` for the plots of memory
    alone. Its folder is made if need be."""
    file = Path(path)
    if file.suffix not in _WRITERS:
        raise OrtAccelError(
            f"{str(file)!r} ends in neither .json (for machines) nor .html (for people) nor .png (the plots of memory "
            "alone); name one of these"
        )
    content = _WRITERS[file.suffix](report.to_dict())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_aside(file, content)
    except OSError as error:
        raise OrtAccelError(
            f"the report cannot be written to {file}: {error.strerror or error}; name a file where you may write"
        ) from error


class ReportFile:
    """The file that `observe.report_file` names. Only the first of several processes writes it.

    A file that cannot be written is reported once, at the start of training if possible; training goes on.
    """

    def __init__(self, report: Report, path: Path) -> None:
        self._report, self._path = report, path
        self._is_ours, self._is_due, self._said = rank() == 0, True, False
        if self._is_ours:
            self._probe()

    def write(self) -> None:
        """Write the current report."""
        if not self._is_ours:
            return
        self._is_due = False
        try:
            save_report(self._report, self._path)
        except OrtAccelError as error:
            self._say(str(error))

    def write_if_due(self) -> None:
        """Write a report that is not empty and was not written yet."""
        if self._is_due and (self._report.segments or self._report.series or self._report.counters):
            self.write()

    def _probe(self) -> None:
        if why := why_not_writable(self._path):
            self._say(f"the report cannot be written to {self._path}: {why}")

    def _say(self, text: str) -> None:
        self._report.refused(KEY, text)
        if not self._said:
            self._said = True
            LOG.warning("%s: %s", KEY, text)
