"""Timing alternatives against each other, and keeping what was found between runs."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import ort_accel
from ort_accel.files import write_aside
from ort_accel.reporting import Report
from ort_accel.runtime.installed_ort import Flavor
from ort_accel.runtime.session import SessionSettings

Seconds = dict[str, float]
Runs = Mapping[str, Callable[[], object]]

FORMAT = "ort_accel tuning 1"
ROUNDS = 7
"""Rounds after the first; the best one counts, since others can only make a run slower."""


class Stopwatch:
    """Times alternatives in turns, all races together within a limit."""

    def __init__(
        self,
        limit: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """`limit` is in seconds; `settle` waits until what was begun is done."""
        self.left = limit
        self._clock, self._settle = clock, settle

    def race(self, subject: str, runs: Runs, share: float = 1.0, in_a_row: int = 1) -> Seconds | None:  # noqa: ARG002
        """The shortest time of each run, within a share of what is left; None where that is too short for one round.

        `subject` says what is raced. Each turn has `in_a_row` runs, so that they find the caches as they left them.
        """
        began = self._clock()
        end = began + self.left * share
        best: Seconds = {}
        for number in range(1 + ROUNDS):
            started = self._clock()
            for name, run in runs.items():
                if self._clock() >= end:
                    break
                for _ in range(in_a_row):
                    seconds = self._timed(run)
                    if number:  # the first round warms up
                        best[name] = min(seconds, best.get(name, math.inf))
            now = self._clock()
            if now + (now - started) > end:
                break
        self.left = max(0.0, self.left - (self._clock() - began))
        return best if len(best) == len(runs) else None

    def _timed(self, run: Callable[[], object]) -> float:
        self._settle()
        start = self._clock()
        run()
        self._settle()
        return self._clock() - start


class Results:
    """Measurements by fingerprint, in a file where one is named. Trouble with the file costs only the time saved."""

    def __init__(self, path: Path | None, context: str, report: Report) -> None:
        """`context` names what besides the thing measured decides its time: machine, versions, threads."""
        self._path, self._context, self._report = path, context, report
        self._entries = self._read()
        self._new: dict[str, Any] = {}

    def get(self, *subject: str) -> Any:
        """What is known of a subject; None if nothing is."""
        return self._entries.get(self._fingerprint(subject))

    def put(self, value: Any, *subject: str) -> None:
        """Keep what was found; it is on disk after `save`."""
        key = self._fingerprint(subject)
        self._entries[key] = self._new[key] = value

    def save(self) -> None:
        """Add what is new to the file, beside what other processes have written there meanwhile."""
        if self._path is None or not self._new:
            return
        content = json.dumps({"format": FORMAT, "entries": self._read() | self._new}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_aside(self._path, content.encode())
        except OSError as error:
            self._say(f"cannot write {self._path}: {error.strerror}; nothing is kept")
        self._new = {}

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            content = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._say(f"cannot read {self._path}: {error.strerror}; all is measured again")
            return {}
        except ValueError:
            content = None
        if not isinstance(content, dict) or content.get("format") != FORMAT or not _is_sound(content.get("entries")):
            self._say(f"{self._path} is damaged, or was written by another version; it is made again")
            return {}
        return dict(content["entries"])

    def _fingerprint(self, subject: tuple[str, ...]) -> str:
        return hashlib.sha256("\0".join([self._context, *subject]).encode()).hexdigest()[:32]

    def _say(self, what: str) -> None:
        self._report.note(f"compute.tuning.results: {what}")


def _is_sound(entries: Any) -> bool:
    """Whether entries are as `put` leaves them: each has the seconds of what was raced."""
    return isinstance(entries, dict) and all(
        isinstance(entry, dict)
        and isinstance(seconds := entry.get("seconds"), dict)
        and all(isinstance(value, float) for value in seconds.values())
        and isinstance(entry.get("in_pytorch", []), list)
        for entry in entries.values()
    )


def context_of(runtime: Flavor, settings: SessionSettings) -> str:
    """What measurements hold for."""
    versions = f"{ort_accel.__version__} {torch.__version__} {runtime.distribution} {runtime.version}"
    threads = f"{settings.threads} threads, {torch.get_num_threads()} of torch"
    return "\n".join([versions, threads, f"optimize {settings.optimize}", settings.place.hardware()])
