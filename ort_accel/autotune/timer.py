"""Times alternatives against each other, and keeps the results between runs. Every measurement comes through here."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict, TypeGuard, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

import ort_accel
from ort_accel.files import write_aside
from ort_accel.reporting.report import Report
from ort_accel.runtime.device import ExecutionDevice
from ort_accel.runtime.installed_ort import Flavor
from ort_accel.runtime.session import SessionSettings

MeasurementT = TypeVar("MeasurementT")

Seconds = dict[str, float]


class Entry(TypedDict, total=False):
    """One saved measurement."""

    seconds: Seconds
    in_pytorch: list[str]
    """Names of the nodes that PyTorch runs in the fastest division of a graph."""


Runs = Mapping[str, Callable[[], object]]

FORMAT = "ort_accel tuning 1"
ROUNDS = 7
"""Rounds after the first. The shortest time counts: other load on a machine can only make a run longer."""


class Stopwatch:
    """Times alternatives in turns. All races together stay within a limit."""

    def __init__(
        self,
        limit: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """`limit` is in seconds; `settle` waits until all kernels that were launched are done."""
        self.left = limit
        self._clock, self._settle = clock, settle

    def race(self, runs: Runs, share: float = 1.0, rounds: int = ROUNDS, in_a_row: int = 1) -> Seconds | None:
        """Returns the shortest time of each run, after a round that warms up; None if time is short for one round.

        The race takes at most a share of the time that is left. Each turn has `in_a_row` runs: those after the first
        find the caches as they left them, and pay for no handover.
        """
        began = self._clock()
        end = began + self.left * share
        best: Seconds = {}
        for number in range(1 + rounds):
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


def race(runs: Runs, rounds: int = ROUNDS, in_a_row: int = 1) -> Seconds:
    """Returns the shortest time of each run, without a limit."""
    seconds = Stopwatch().race(runs, rounds=rounds, in_a_row=in_a_row)
    assert seconds is not None
    return seconds


@contextmanager
def isolated(place: ExecutionDevice) -> Iterator[None]:
    """Run real tensors while the code around is traced. The random number generators stay as they are."""
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast(place.kind, enabled=False),
        torch.random.fork_rng(devices=[place.index] if place.is_cuda else []),
    ):
        yield


def measured(place: ExecutionDevice, measure: Callable[[], MeasurementT]) -> MeasurementT | None:
    """Measures in isolation. Returns None if that fails, as it does where one side has no kernel."""
    with isolated(place):
        try:
            return measure()
        except Exception:
            return None


class SavedTimings:
    """Measurements by fingerprint, in a file where one is named. A bad file costs only the time it would save."""

    def __init__(self, path: Path | None, context: str, report: Report) -> None:
        """`context` names the machine, versions and threads for which measurements hold."""
        self._path, self._context, self._report = path, context, report
        self._entries = self._read()
        self._new: dict[str, Entry] = {}

    def get(self, *subject: str) -> Entry | None:
        """Returns the measurement of a subject; None if there is none."""
        return self._entries.get(self._fingerprint(subject))

    def put(self, value: Entry, *subject: str) -> None:
        """Keep a measurement; `save` writes it to disk."""
        key = self._fingerprint(subject)
        self._entries[key] = self._new[key] = value

    def save(self) -> None:
        """Add new measurements to the file, beside those that other processes have written there meanwhile."""
        if self._path is None or not self._new:
            return
        content = json.dumps({"format": FORMAT, "entries": self._read() | self._new}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_aside(self._path, content.encode())
        except OSError as error:
            self._say(f"cannot write {self._path}: {error.strerror}; nothing is kept")
        self._new = {}

    def _read(self) -> dict[str, Entry]:
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
        entries = content.get("entries") if isinstance(content, dict) and content.get("format") == FORMAT else None
        if not _is_sound(entries):
            self._say(f"{self._path} is damaged, or was written by another version; it is made again")
            return {}
        return entries

    def _fingerprint(self, subject: tuple[str, ...]) -> str:
        return hashlib.sha256("\0".join([self._context, *subject]).encode()).hexdigest()[:32]

    def _say(self, problem: str) -> None:
        self._report.note(f"compute.tuning.results: {problem}")


def _is_sound(entries: object) -> TypeGuard[dict[str, Entry]]:
    """True if entries are as `put` leaves them: each has the seconds of a race."""
    return isinstance(entries, dict) and all(
        isinstance(entry, dict)
        and isinstance(seconds := entry.get("seconds"), dict)
        and all(isinstance(value, float) for value in seconds.values())
        and isinstance(entry.get("in_pytorch", []), list)
        for entry in entries.values()
    )


def context_of(runtime: Flavor, settings: SessionSettings) -> str:
    """Returns the machine, versions and settings for which measurements hold."""
    versions = f"{ort_accel.__version__} {torch.__version__} {runtime.distribution} {runtime.version}"
    threads = f"{settings.threads} threads, {torch.get_num_threads()} of torch"
    return "\n".join([versions, threads, f"optimize {settings.optimize}", settings.place.hardware()])
