"""A journal of crashes in ONNX Runtime: after two crashes in a model, PyTorch runs it.

While ONNX Runtime creates a session or runs it for the first time, an empty file, the marker, lies beside the cache.
The marker's name holds the model's key, the number of the attempt, the machine and the process. Later runs are noted
on the page of the process (`crash_page.py`), and the page of a crashed process is turned into markers. All processes of
one launch make the same attempt, so a launch that crashes counts once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from ort_accel.errors import OrtAccelError
from ort_accel.observe.logs import LOG
from ort_accel.reporting.report import Report
from ort_accel.runtime.crash_page import RunningModel, is_safe_to_map, models_at_crash, orphaned_pages, page_in
from ort_accel.runtime.lock_files import delete_files, is_orphaned, locked_file, machine
from ort_accel.runtime.model_cache import ModelKeys

FOLDER = "attempts"

LATER_RUN = "later-"
"""The prefix of a marker's last part if the crash was in a later run than the first."""

MAX_CRASHES = 2
"""The number of crashes in a model after which PyTorch runs it."""


class CrashedBefore(OrtAccelError):
    """Raised instead of giving ONNX Runtime a model in which earlier runs crashed."""


class CrashJournal:
    """Remembers on disk what ONNX Runtime is doing. Errors of the folder are only noted in the report."""

    def __init__(self, folder: Path, keys: ModelKeys, report: Report) -> None:
        """`folder` is the cache's, which processes may share."""
        self.folder = (folder / FOLDER).absolute()
        self._keys, self._report = keys, report
        self._unwritten: list[_Marker] = []
        """Markers from pages that could not be written as files."""
        with suppress(OSError):
            self._turn_pages_into_markers()
        if not is_safe_to_map(self.folder):
            self._report.note(
                f"engine.cache_dir: on the file system of {folder} only crashes in a model's first run are remembered"
            )

    def attempt(self, model: bytes, name: str) -> Attempt:
        """Begin an attempt at a model, which messages call `name`. Raises `CrashedBefore` after too many crashes."""
        key = self._keys.of(model)
        earlier = self._markers_of_crashes(key)
        crashes = max((marker.number for marker in earlier), default=0)
        ended = f"{crashes} {'run' if crashes == 1 else 'runs'} ended while ONNX Runtime created or ran it"
        if crashes >= MAX_CRASHES:
            self._warn(f"{name}: PyTorch runs it, since {ended}; delete {self.folder} to have it tried again")
            raise CrashedBefore(ended)
        if crashes:
            self._warn(f"{name}: {ended}; it is tried once more")
        return Attempt(self, key, crashes + 1, tuple(earlier))

    @contextmanager
    def marked(self, name: str) -> Iterator[None]:
        """Keep a locked file of this name while the context is entered."""
        path = self.folder / name
        try:
            lock = locked_file(path)
        except OSError as error:
            self._report.note(
                f"engine.cache_dir: cannot write to {self.folder}: {error.strerror}; "
                "should ONNX Runtime end a process, the next run will not know"
            )
            lock = None
        try:
            yield
        finally:
            if lock is not None:
                delete_files([path])
                os.close(lock)

    def _turn_pages_into_markers(self) -> None:
        for page in orphaned_pages(self.folder):
            with suppress(FileNotFoundError):  # another process has just done so
                for key, number in models_at_crash(page):
                    self._write_marker(key, number, page.name.rpartition(".")[2])
                delete_files([page])

    def _write_marker(self, key: str, number: int, process: str) -> None:
        path = self.folder / f"{key}.{number}.{machine()}.{LATER_RUN}{process}"
        try:
            path.touch()
        except OSError:
            self._unwritten.append(_Marker(path, number, machine()))

    def _markers_of_crashes(self, key: str) -> list[_Marker]:
        try:
            markers = [
                marker for path in self.folder.glob(f"{key}.*") if (marker := _Marker.from_path(path)) is not None
            ]
        except OSError:
            markers = []
        unwritten = [marker for marker in self._unwritten if marker.path.name.startswith(key)]
        return unwritten + [marker for marker in markers if is_orphaned(marker.path, marker.machine)]

    def _warn(self, text: str) -> None:
        self._report.note(text)
        LOG.warning(text)


@dataclass(frozen=True)
class _Marker:
    """A file that tells of a process that ran a model, or crashed in it."""

    path: Path
    number: int
    machine: str

    @classmethod
    def from_path(cls, path: Path) -> _Marker | None:
        parts = path.name.split(".")
        return cls(path, int(parts[1]), parts[2]) if len(parts) == 4 and parts[1].isdecimal() else None

    @property
    def is_of_later_run(self) -> bool:
        return self.path.name.rpartition(".")[2].startswith(LATER_RUN)


@dataclass(frozen=True)
class Attempt:
    """The use of a model in this process. Without a journal nothing is written."""

    journal: CrashJournal | None = None
    key: str = ""
    number: int = 1
    earlier: tuple[_Marker, ...] = ()
    """The markers of runs that crashed in this model."""

    def first_use(self) -> AbstractContextManager[None]:
        """Returns a context in which ONNX Runtime creates a session of the model or runs it for the first time."""
        if self.journal is None:
            return nullcontext()
        return self.journal.marked(f"{self.key}.{self.number}.{machine()}.{os.getpid()}")

    def succeeded(self) -> None:
        """Forget the crashes of earlier first uses, since the model has run."""
        delete_files(marker.path for marker in self.earlier if not marker.is_of_later_run)

    def later_runs(self) -> AbstractContextManager[None]:
        """Returns a context in which ONNX Runtime runs the model again and again.

        Crashes of earlier later runs are forgotten when this process ends without a crash.
        """
        if self.journal is None:
            return nullcontext()
        later = [marker for marker in self.earlier if marker.is_of_later_run]
        page = page_in(self.journal.folder)
        page.delete_at_exit(marker.path for marker in later)
        return RunningModel(page, self.key, 1 + max((marker.number for marker in later), default=0))
